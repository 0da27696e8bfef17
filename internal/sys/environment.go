package sys

import (
	"os"
	"strings"
	"sync/atomic"
)

// environment holds the variables that SetEnvironment was given; nil: those of the process count.
var environment atomic.Pointer[map[string]string]

// SetEnvironment replaces the variables of the environment that Getenv reads by others, of the
// form NAME=VALUE. It is for the backend of the C library: the Go runtime reads the
// environment where it lay when the process was started, and a program in C may have written over that.
func SetEnvironment(vars []string) {
	m := make(map[string]string, len(vars))
	for _, v := range vars {
		name, value, _ := strings.Cut(v, "=")
		if _, known := m[name]; !known { // the first one counts, as in getenv
			m[name] = value
		}
	}
	environment.Store(&m)
}

// Getenv returns the value of a variable of the environment, or "".
func Getenv(name string) string {
	if m := environment.Load(); m != nil {
		return (*m)[name]
	}
	return os.Getenv(name)
}

// ResetEnvironment ends what SetEnvironment has begun; for tests.
func ResetEnvironment() { environment.Store(nil) }
