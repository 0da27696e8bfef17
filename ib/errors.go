package ib

import (
	"fmt"
	"syscall"
)

// OpError is the error of a verb that fails: the verb, the errno that its manual
// page names, and what exactly was wrong. errors.Is finds the errno:
//
//	if errors.Is(err, syscall.EBUSY) { … }
type OpError struct {
	Op     string        // the verb, as in "create_qp"
	Errno  syscall.Errno // why, for programs
	Detail string        // why, for people; may be empty
}

// Errorf makes an *OpError whose Detail is formatted.
func Errorf(op string, errno syscall.Errno, format string, args ...any) *OpError {
	return &OpError{Op: op, Errno: errno, Detail: fmt.Sprintf(format, args...)}
}

func (e *OpError) Error() string {
	if e.Detail == "" {
		return e.Op + ": " + e.Errno.Error()
	}
	return e.Op + ": " + e.Detail + ": " + e.Errno.Error()
}

// Unwrap returns the errno.
func (e *OpError) Unwrap() error { return e.Errno }
