package wire

import "time"

// rnrTimers are the delays that an RNR NAK can ask for (IBA table 45), in units
// of 10 µs. The code for the longest is 0.
var rnrTimers = [32]uint32{
	65536, 1, 2, 3, 4, 6, 8, 12,
	16, 24, 32, 48, 64, 96, 128, 192,
	256, 384, 512, 768, 1024, 1536, 2048, 3072,
	4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
}

// RNRDelay returns how long the requester waits after an RNR NAK with the given
// timer code, of which the low five bits count (IBA 9.7.5.2.8).
func RNRDelay(code uint8) time.Duration {
	return time.Duration(rnrTimers[code&31]) * 10 * time.Microsecond
}

// AckTimeout returns the local acknowledge timeout for a code, of which the low
// five bits count: 4.096 µs × 2^code. Code 0 stands for no timeout and gives 0
// (IBA 9.7.6.1.3).
func AckTimeout(code uint8) time.Duration {
	if code &= 31; code == 0 {
		return 0
	}
	return 4096 * time.Nanosecond << code
}
