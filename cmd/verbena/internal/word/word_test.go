package word

import (
	"encoding/binary"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestLoadByte(t *testing.T) {
	b := make([]byte, 4096)
	for i := range b {
		b[i] = byte(i*7 + i>>8)
	}
	for i := range b {
		if got := LoadByte(b, i); got != b[i] {
			t.Fatalf("byte %d is %#x, want %#x", i, got, b[i])
		}
	}
}

func TestLoadStore(t *testing.T) {
	b := make([]byte, 32)
	Store(b[8:], 0x0123456789abcdef)
	if got := Load(b[8:]); got != 0x0123456789abcdef || binary.NativeEndian.Uint64(b[8:]) != got {
		t.Errorf("loaded %#x from %x", got, b)
	}
	if Load(b) != 0 || Load(b[16:]) != 0 {
		t.Errorf("neighbours have changed: %x", b)
	}
	defer func() {
		if recover() == nil {
			t.Error("7 bytes are taken for a word")
		}
	}()
	Load(b[:7])
}
