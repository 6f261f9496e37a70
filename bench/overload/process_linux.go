package overload

import "syscall"

// apart keeps Ctrl-C from the targets, which are this process's to end, and ends them with it.
func apart() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
