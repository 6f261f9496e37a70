//go:build unix && !linux

package cluster

import "syscall"

// apart keeps Ctrl-C from the nodes, which are this process's to end.
func apart() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
