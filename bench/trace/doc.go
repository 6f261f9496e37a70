// Package trace reads what arrived at real services, so that benchmarks replay it: our own format, two that others
// publish, and our own usage log.
//
// Our own format is CSV (RFC 4180) with a head line that names the columns, in any order; others are passed over:
//
//	time,tenant,input_tokens,output_tokens
//	0,acme,374,44
//	4.3145,globex,396,109
//
// time is in seconds from any start or RFC 3339, one of the two in a file, and never before that of the line in front.
// Where no column tenant is there, a Split says whose requests are whose.
//
// Nothing here knows what was asked or answered, only how many tokens that were.
package trace
