package ledger

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash/crc32"
	"io"
	"strings"
)

// A key is hg_live_ or hg_test_, 64 hexadecimal digits of 256 random bits, and 8 digits
// of the CRC-32 (IEEE) of all that stands before them. The checksum lets a mistyped key be
// told from an unknown one, and a scanner of leaked secrets tell a key from noise.
const (
	livePrefix = "hg_live_"
	testPrefix = "hg_test_"
	keyLength  = len(livePrefix) + 64 + 8
	// MinKeyLength is the least that a development key of any form must have.
	MinKeyLength = 16
)

// NewKey makes a key from 32 bytes of random, which must be cryptographic. The secret is
// to be shown once; the hash is what a policy holds.
func NewKey(random io.Reader, live bool) (secret string, hash [32]byte, err error) {
	var bits [32]byte
	if _, err := io.ReadFull(random, bits[:]); err != nil {
		return "", hash, fmt.Errorf("make a key: %w", err)
	}
	prefix := testPrefix
	if live {
		prefix = livePrefix
	}
	secret = prefix + hex.EncodeToString(bits[:])
	secret += checksum(secret)
	return secret, HashKey(secret), nil
}

// HashKey is the SHA-256 of the whole key. The key has 256 random bits, so that nothing
// slower or salted would add to it.
func HashKey(secret string) [32]byte { return sha256.Sum256([]byte(secret)) }

// FormatHash is how a policy writes a hash.
func FormatHash(h [32]byte) string { return "sha256:" + hex.EncodeToString(h[:]) }

// CheckFormat says whether a key is well formed; its error never holds the key.
func CheckFormat(secret string) error {
	switch {
	case !strings.HasPrefix(secret, livePrefix) && !strings.HasPrefix(secret, testPrefix):
		return fmt.Errorf("a key begins with %s or %s", livePrefix, testPrefix)
	case len(secret) != keyLength:
		return fmt.Errorf("a key has %d characters, this has %d: it was cut or mistyped", keyLength, len(secret))
	case checksum(secret[:keyLength-8]) != secret[keyLength-8:]:
		return fmt.Errorf("the key's checksum does not fit: it was mistyped")
	}
	return nil
}

func checksum(s string) string { return fmt.Sprintf("%08x", crc32.ChecksumIEEE([]byte(s))) }
