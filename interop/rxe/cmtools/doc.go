// Package cmtools plays one side of the programs of rdmacm-utils, by package cm. The other side is the
// unmodified program, on another device and with another connection manager. So package cm is tested
// against programs that know nothing of it.
//
// A [Meeting] has the device, the address and the numbers that both sides must agree on; each program
// has a function for the server and one for the client.
//
//	// rping -c -C 10 -S 100 -V -a 10.0.0.2       (the program dials us)
//	m := cmtools.Meeting{Device: dev, Addr: "10.0.0.2:7174", Count: 10, Size: 100, Listening: startTheProgram}
//	err := cmtools.RpingServer(ctx, &m)
//
// The functions check what the programs do not: every completion, the length of every message, all
// contents that can be predicted, the private data, and how the connection ends. When they return, all
// objects that they made are gone, also after a failure or when the context has ended.
package cmtools
