// This file lets the compiler accept functions without a body: those of
// ppoll_unsafe.go that stand in the runtime.
