package wire

import (
	"testing"
	"time"
)

func TestRNRDelay(t *testing.T) {
	for _, c := range []struct {
		code uint8
		want time.Duration
	}{
		{0, 655360 * time.Microsecond},
		{1, 10 * time.Microsecond},
		{4, 40 * time.Microsecond},
		{5, 60 * time.Microsecond},
		{12, 640 * time.Microsecond},
		{16, 2560 * time.Microsecond},
		{23, 30720 * time.Microsecond},
		{31, 491520 * time.Microsecond},
		{0xe1, 10 * time.Microsecond}, // upper bits are not the code's
	} {
		if d := RNRDelay(c.code); d != c.want {
			t.Errorf("RNRDelay(%d) = %v, want %v", c.code, d, c.want)
		}
	}
	// from code 4 on two steps double the delay
	for code := uint8(2); code < 32; code++ {
		if RNRDelay(code) <= RNRDelay(code-1) {
			t.Errorf("RNRDelay(%d) does not grow", code)
		}
		if code >= 6 && RNRDelay(code) != 2*RNRDelay(code-2) {
			t.Errorf("RNRDelay(%d) is not twice RNRDelay(%d)", code, code-2)
		}
	}
}

func TestRNRSyndrome(t *testing.T) {
	for code := range uint8(32) {
		s := RNRNak(code)
		if !s.IsRNR() || s.IsAck() || s.IsNak() || s.Value() != code {
			t.Errorf("RNRNak(%d) = %#x", code, s)
		}
	}
	if !AckNoCredits.IsAck() || AckNoCredits.Value() != 31 {
		t.Error("AckNoCredits is not an ACK with credit count 31")
	}
	for i, s := range []Syndrome{NakPSNSequence, NakInvalidReq, NakRemoteAccess, NakRemoteOpError, NakInvalidRD} {
		if !s.IsNak() || s.IsAck() || s.IsRNR() || int(s.Value()) != i {
			t.Errorf("NAK %d = %#x", i, s)
		}
	}
}

func TestAckTimeout(t *testing.T) {
	for _, c := range []struct {
		code uint8
		want time.Duration
	}{
		{0, 0},
		{1, 8192 * time.Nanosecond},
		{14, 67108864 * time.Nanosecond},
		{31, 8796093022208 * time.Nanosecond},
		{32, 0},
	} {
		if d := AckTimeout(c.code); d != c.want {
			t.Errorf("AckTimeout(%d) = %v, want %v", c.code, d, c.want)
		}
	}
}
