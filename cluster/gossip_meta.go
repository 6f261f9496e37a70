package cluster

import (
	"encoding/binary"
	"errors"
	"fmt"
)

const (
	metaMagic   = 'H'
	metaVersion = 1

	maxServerIDLen  = maxNameLen + 9
	maxVersionLen   = 64
	maxClusterIDLen = 32
	maxClusterLen   = 63 // of a DNS label, since certificates carry it

	metaFounded = 1 << 0
	metaLeaving = 1 << 1
)

var errForeignMeta = errors.New("not a Headgate node's description")

// nodeMeta is what a node tells all others of itself through gossip, in at most 512 bytes
// (memberlist's bound). Magic, version and protocol stand first and keep their place for
// ever, so that nodes of different versions can tell each other apart; unknown bytes at the
// end are of a later version and are ignored.
type nodeMeta struct {
	Protocol        uint32
	Incarnation     uint64
	Cluster         string
	ServerID        string
	Version         string
	ClusterID       []byte // empty: part of no cluster yet
	BootstrapExpect uint32
	Founded         bool
	Leaving         bool
}

// encode cuts a version that is too long; the other fields were checked at the start.
func (m nodeMeta) encode() []byte {
	b := []byte{metaMagic, metaVersion}
	b = binary.BigEndian.AppendUint32(b, m.Protocol)
	b = binary.BigEndian.AppendUint64(b, m.Incarnation)
	b = appendShort(b, m.Cluster)
	b = appendShort(b, m.ServerID)
	b = appendShort(b, m.Version[:min(len(m.Version), maxVersionLen)])
	b = appendShort(b, string(m.ClusterID))
	b = binary.BigEndian.AppendUint32(b, m.BootstrapExpect)
	var flags byte
	if m.Founded {
		flags |= metaFounded
	}
	if m.Leaving {
		flags |= metaLeaving
	}
	return append(b, flags)
}

// decodeMeta reads untrusted bytes. Of another version it gives the protocol alone, with no
// error: it is the caller who refuses by protocol.
func decodeMeta(b []byte) (nodeMeta, error) {
	var m nodeMeta
	if len(b) < 6 || b[0] != metaMagic {
		return m, errForeignMeta
	}
	m.Protocol = binary.BigEndian.Uint32(b[2:])
	if b[1] != metaVersion {
		return nodeMeta{Protocol: m.Protocol}, fmt.Errorf("description of version %d, not %d", b[1], metaVersion)
	}
	b = b[6:]
	if len(b) < 8 {
		return m, errForeignMeta
	}
	m.Incarnation = binary.BigEndian.Uint64(b)
	b = b[8:]
	var id string
	for _, field := range []struct {
		to  *string
		max int
	}{{&m.Cluster, maxClusterLen}, {&m.ServerID, maxServerIDLen}, {&m.Version, maxVersionLen}, {&id, maxClusterIDLen}} {
		var ok bool
		if *field.to, b, ok = cutShort(b, field.max); !ok {
			return m, errForeignMeta
		}
	}
	if len(b) < 5 || m.Incarnation == 0 {
		return m, errForeignMeta
	}
	if id != "" {
		m.ClusterID = []byte(id)
	}
	m.BootstrapExpect = binary.BigEndian.Uint32(b)
	m.Founded, m.Leaving = b[4]&metaFounded != 0, b[4]&metaLeaving != 0
	return m, nil
}

// appendShort appends s, of at most 255 bytes, after its length.
func appendShort(b []byte, s string) []byte {
	return append(append(b, byte(len(s))), s...)
}

func cutShort(b []byte, most int) (s string, rest []byte, ok bool) {
	if len(b) == 0 || int(b[0]) > most || len(b) < 1+int(b[0]) {
		return "", nil, false
	}
	n := 1 + int(b[0])
	return string(b[1:n]), b[n:], true
}
