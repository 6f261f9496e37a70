// Package pki makes, loads and renews what the nodes of one cluster trust each other by:
// a certificate authority, a certificate for each node, and the keys of their gossip. It
// needs no network: `headgate init` writes a folder on any machine, from which each node
// gets its own.
//
//	DIR/ca.pem, ca-key.pem      the authority; ca-key.pem never leaves this machine
//	DIR/gossip.keys             base64, one a line, the first encrypts
//	DIR/admin-token
//	DIR/NAME/ca.pem, node.pem, node-key.pem, gossip.keys, admin-token
//	                            all that node NAME needs: copy this folder to it
//
// What makes a peer one of ours: its certificate is signed by an authority in ca.pem, is
// valid now, and carries the DNS name node.CLUSTER.headgate. Both ends of a connection are
// checked in the same way, so two clusters cannot meet even if they share an authority.
// Which node it is stands in the URI headgate://CLUSTER/node/NAME.
//
// Nothing ever goes wrong at once: certificates, authority and gossip keys are replaced in
// phases (see RenewNode, RotateCA, RotateGossipKey), after each of which all nodes,
// those that have the new files and those that do not yet, still trust each other. A Bundle
// re-reads its files by itself (Watch); files that do not fit each other are reported and
// the old ones stay in use.
//
// It deliberately leaves out revocation: a node's certificate ends with its validity or with
// its authority. To shut a stolen one out, rotate the authority.
package pki
