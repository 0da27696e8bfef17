//go:build !cgo

// This file lets the compiler accept functions without a body: those of
// ppoll_unsafe.go that stand in the runtime. With cgo it accepts them anyway, and
// would give this file to the C compiler.
