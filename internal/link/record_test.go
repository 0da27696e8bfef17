package link

import (
	"math/rand/v2"
	"net/netip"
	"reflect"
	"testing"

	"github.com/verbena-rdma/verbena/internal/train"
)

// notSent are the fields of a train that mean something to one side only.
var notSent = map[string]bool{"Hints": true, "Marked": true, "Flow": true, "Payload": true, "Bounce": true, "Again": true, "Expired": true, "Cookie": true, "Ticket": true, "sges": true, "raw": true, "inline": true, "Lease": true, "LeaseAt": true, "Lent": true, "Carried": true, "Name": true, "Kept": true}

// fill sets every exported field to something random, so that one that is lost
// on the way is noticed.
func fill(rng *rand.Rand, v reflect.Value) {
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			if f := v.Type().Field(i); f.IsExported() && !notSent[f.Name] {
				fill(rng, v.Field(i))
			}
		}
	case reflect.Bool:
		v.SetBool(rng.IntN(2) == 1)
	case reflect.Uint8:
		v.SetUint(uint64(1 + rng.IntN(255)))
	case reflect.Uint32, reflect.Uint64:
		v.SetUint(uint64(1 + rng.IntN(1<<24-1)))
	case reflect.Int:
		v.SetInt(1)
	default:
		panic(v.Kind())
	}
}

// A train arrives as it was sent, every field of it.
func TestRecordTrain(t *testing.T) {
	const seed = 5
	rng := rand.New(rand.NewPCG(seed, 0))
	for range 1000 {
		var in, out train.Train
		addrs := [2]netip.Addr{netip.MustParseAddr("10.1.2.3"), netip.MustParseAddr("fd00::7")}
		in.From, in.To = addrs[rng.IntN(2)], addrs[rng.IntN(2)]
		v := reflect.ValueOf(&in).Elem()
		for i := range v.NumField() {
			if f := v.Type().Field(i); f.IsExported() && !notSent[f.Name] && f.Name != "From" && f.Name != "To" {
				fill(rng, v.Field(i))
			}
		}
		in.Flow = &train.Flow{TClass: in.TClass, HopLimit: in.HopLimit}
		b := make([]byte, trainBytes+1)
		packTrain(b, &in, in.From, in.To)
		if b[trainBytes] != 0 || !unpackTrain(b, &out, train.MaxBytes) {
			t.Fatalf("%+v is refused", in)
		}
		out.Flow = in.Flow
		for i := range v.NumField() {
			if a, b := v.Field(i), reflect.ValueOf(&out).Elem().Field(i); v.Type().Field(i).IsExported() && !reflect.DeepEqual(a.Interface(), b.Interface()) {
				t.Fatalf("%s: sent %v, got %v", v.Type().Field(i).Name, a, b)
			}
		}
		if unpackTrain(b[:trainBytes-1], &out, train.MaxBytes) {
			t.Fatal("a short record is taken")
		}
	}
}

// Records that no peer sends are refused without a crash.
func TestRecordNonsense(t *testing.T) {
	for _, bad := range []train.Train{
		{N: 0}, {N: -1}, {N: 1, Len: 4097}, {N: 1, MTU: 5000}, {N: 2, MTU: 255, Len: 510}, {N: 2, MTU: 1024, Len: 1024, End: true},
		{N: 2, MTU: 1024, Len: 2047}, {N: 2, MTU: 1024, Len: 2049, End: true}, {N: 1 << 20, MTU: 4096, Len: 1 << 32},
	} {
		if sensible(&bad, train.MaxBytes) {
			t.Errorf("%+v is taken", bad)
		}
	}
	long := train.Train{N: train.MaxCarried / 4096, MTU: 4096, Len: train.MaxCarried}
	if sensible(&long, train.MaxBytes) || !sensible(&long, train.MaxCarried) {
		t.Error("what is carried may be longer, and nothing else")
	}
	if long.N, long.Len = long.N+1, long.Len+4096; sensible(&long, train.MaxCarried) {
		t.Error("more is taken than a train carries")
	}
	rng := rand.New(rand.NewPCG(1, 2))
	b := make([]byte, 4096)
	for range 10000 {
		for i := range b[:trainBytes] {
			b[i] = byte(rng.Uint32())
		}
		var out train.Train
		if unpackTrain(b, &out, train.MaxBytes) && !sensible(&out, train.MaxBytes) {
			t.Fatalf("%+v", out)
		}
		var p Packets
		if unpackPackets(b[:rng.IntN(len(b))], &p) && (p.Segment <= 0 || len(p.Bytes) == 0) {
			t.Fatalf("%+v", p)
		}
	}
}

func TestRecordPackets(t *testing.T) {
	in := Packets{From: netip.MustParseAddrPort("10.1.2.3:50000"), To: netip.MustParseAddr("fd00::9"), TClass: 3, HopLimit: 9, ID: 17, Segment: 40,
		Bytes: make([]byte, 99)}
	b := make([]byte, packetsBytes+len(in.Bytes))
	packPackets(b, &in)
	var out Packets
	if !unpackPackets(b, &out) || !reflect.DeepEqual(in, out) {
		t.Errorf("sent %+v, got %+v", in, out)
	}
}
