// Package tools plays one side of unmodified RDMA test programs: the ping-pongs
// of ibverbs-utils and the tests of perftest. The other side is the program
// itself, on another device. So our packets are tested against another
// implementation of verbs, whose programs need no change.
//
// A program that has a [verbs.Device] open calls [Pingpong] or [Perftest]. Both
// speak the program's own protocol over TCP, connect queue pairs, move the data
// and check it. When they return, all objects, sockets and goroutines that they
// made are gone, also after a failure or when the context was cancelled.
//
//	// ibv_rc_pingpong -d rxe0 -g 1 -s 65536 -n 100 -m 1024 -c      (on 10.0.0.1)
//	res, err := tools.Pingpong(ctx, dev, tools.PingpongConfig{
//		Peer:    tools.Peer{Role: tools.Client, Addr: "10.0.0.1"},
//		Program: tools.RCPingpong,
//		Size:    65536, Iters: 100, MTU: verbs.MTU1024, Check: true,
//	})
//
//	// ib_read_bw -d rxe0 -x 1 -s 65536 -n 1000 -m 4096 10.0.0.2    (on 10.0.0.1)
//	res, err := tools.Perftest(ctx, dev, tools.PerftestConfig{
//		Peer: tools.Peer{Role: tools.Server, Listening: func(net.Addr) { startTheProgram() }},
//		Test: tools.ReadBW,
//		Size: 65536, Iters: 1000, MTU: verbs.MTU4096,
//	})
//
// The programs do not tell each other their options: size, number of iterations,
// number of queue pairs and transport must be the same on both sides. The zero
// value of a field is the program's own default.
//
// # Programs
//
//	ibv_rc_pingpong  ibv_uc_pingpong  ibv_ud_pingpong  ibv_srq_pingpong
//	ib_write_bw  ib_read_bw  ib_send_bw  ib_atomic_bw     also with -b
//	ib_write_lat ib_read_lat ib_send_lat ib_atomic_lat
//
// Of perftest, WRITE and SEND run over UC too, SEND over UD; WRITE with
// --write_with_imm where the program has that option. The exchange is that of
// perftest 4.5 (version 6.06, Debian 12) to 25.01 (6.24). Transports that a test
// does not have are refused with [ErrUnsupported]. There is no support for options
// that change the exchange or the run (-a, -D, -R, -c XRC or DC, --run_infinitely,
// -T, --use-srq, --perform_warm_up, -l, -r smaller than what UC and UD need).
//
// # What is checked
//
// The programs check little. This side checks all that it can predict:
//
//   - pingpong: the programs send back the buffer that they received into. Every
//     message of this side has contents of its own, and its echo is compared. The
//     first message of a client is compared with what the program fills its
//     buffer with. UD: the 40 bytes in front of every message are checked, see
//     [CheckGRH]. With Check our messages satisfy the program's own option -c.
//   - perftest: the programs fill their buffer with rand(3), seeded by the time of
//     day in seconds, after the TCP connection is made. The seed is therefore one
//     of few, and what arrives by READ, WRITE or SEND is compared with the bytes
//     that this seed gives. That needs the rand of the GNU C library and clocks
//     that agree to a second, as in one machine; NoVerify switches it off.
//   - atomics: the values returned (as client) and the words left in memory (as
//     server) are computed beforehand and compared.
//
// [Result] says how many messages were compared.
package tools
