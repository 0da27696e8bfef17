package device

import "github.com/verbena-rdma/verbena/internal/sys"

// SetEnvironment replaces the variables of the environment that the device reads by others, of the
// form NAME=VALUE. It is for the backend of the C library: see sys.SetEnvironment.
func SetEnvironment(vars []string) { sys.SetEnvironment(vars) }

// Getenv returns the value of a variable of the environment, or "".
func Getenv(name string) string { return sys.Getenv(name) }
