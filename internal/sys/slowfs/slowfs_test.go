package slowfs_test

import (
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/internal/sys/slowfs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Reads wait for as long as the file system holds them, and bring what is in the
// file; when it has ended, they fail.
func TestSlowFS(t *testing.T) {
	const size = 1 << 20
	fs := slowfs.New(t, size)
	f := fs.Open()
	b := make([]byte, 10000)
	if _, err := f.ReadAt(b, 4000); err != nil {
		t.Fatal(err)
	}
	for i := range b {
		if b[i] != slowfs.Byte(4000+int64(i)) {
			t.Fatalf("byte %d is %d", i, b[i])
		}
	}
	fs.Hold()
	read := make(chan error, 1)
	go func() {
		_, err := f.ReadAt(b, size/2)
		read <- err
	}()
	select {
	case err := <-read:
		t.Fatal("the read did not wait:", err)
	case <-time.After(50 * time.Millisecond):
	}
	fs.Go()
	if err := <-read; err != nil || b[9] != slowfs.Byte(size/2+9) {
		t.Fatal(err)
	}
	fs.Hold()
	go func() {
		_, err := f.ReadAt(b, size/4)
		read <- err
	}()
	time.Sleep(10 * time.Millisecond)
	fs.Kill()
	if err := <-read; err == nil {
		t.Fatal("a read from a file system that has ended")
	}
}
