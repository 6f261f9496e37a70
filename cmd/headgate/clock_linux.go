package main

import "syscall"

// clockSynced says whether the kernel believes that its clock follows a reference (STA_UNSYNC
// of adjtimex(2)); known is false where it does not tell.
func clockSynced() (synced, known bool) {
	const unsynced = 0x40
	var t syscall.Timex
	if _, err := syscall.Adjtimex(&t); err != nil {
		return false, false
	}
	return t.Status&unsynced == 0, true
}
