package device

import (
	"encoding/binary"
	"testing"

	"github.com/verbena-rdma/verbena/internal/cm"
)

// numberedMAD returns a datagram with a number in it.
func numberedMAD(attr cm.Attr, n int) *mad {
	d := new(mad)
	copy(d.bytes[:], []byte{1, 7, 2, 3}) // base version, class, class version, method
	binary.BigEndian.PutUint16(d.bytes[16:], uint16(attr))
	binary.BigEndian.PutUint32(d.bytes[24:], uint32(n))
	if attr != cm.AttrREQ && attr != cm.AttrREJ {
		binary.BigEndian.PutUint32(d.bytes[28:], 1) // the id of the receiver
	}
	return d
}

// A message that withdraws a request, whose sender does not know the receiver's id, comes behind it.
func TestMADQueueWithdrawn(t *testing.T) {
	q := madQueue{wake: make(chan struct{}, 1)}
	for i, attr := range []cm.Attr{cm.AttrREQ, cm.AttrREJ, cm.AttrRTU} {
		q.put(numberedMAD(attr, i))
	}
	for i, want := range []cm.Attr{cm.AttrRTU, cm.AttrREQ, cm.AttrREJ} {
		if attr, _, _, _ := cm.Classify(q.next().bytes[:]); attr != want {
			t.Errorf("message %d is %#x, want %#x", i, attr, want)
		}
	}
}

// Answers come before requests, in order. If there are too many, the last answers are lost, and of the
// requests those whose places later ones take, so that some of the last stay.
func TestMADQueue(t *testing.T) {
	q := madQueue{wake: make(chan struct{}, 1)}
	lost := 0
	for i := range 2 * maxMADs {
		if !q.put(numberedMAD(cm.AttrREQ, i)) {
			lost++
		}
	}
	for i := range maxMADs + 1 {
		if kept := q.put(numberedMAD(cm.AttrRTU, i)); kept != (i < maxMADs) {
			t.Errorf("answer %d is kept: %v", i, kept)
		}
	}
	if lost != maxMADs {
		t.Errorf("%d requests are lost", lost)
	}
	q.close()
	number := func(d *mad) int { return int(binary.BigEndian.Uint32(d.bytes[24:])) }
	for i := range maxMADs {
		if d := q.next(); d == nil || d.bytes[17] != byte(cm.AttrRTU) || number(d) != i {
			t.Fatalf("answer %d: %+v", i, d)
		}
	}
	first, late := 0, 0
	for range maxMADs {
		d := q.next()
		if d == nil {
			t.Fatal("a request is missing")
		}
		if number(d) < maxMADs {
			first++
		} else {
			late++
		}
	}
	if first < maxMADs/5 || late < maxMADs/5 { // about 0.37 and 0.63 of them
		t.Errorf("%d of the first and %d of the last requests stay", first, late)
	}
	if d := q.next(); d != nil {
		t.Errorf("datagram %+v", d)
	}
}
