//go:build !linux

package overload

import "syscall"

// apart changes nothing here: the targets end with their standard input, or by stop.
func apart() *syscall.SysProcAttr { return nil }
