package store

// What the sides say to each other. All numbers are in network byte order.
//
//	hello, of the client when it connects:  magic, 4 bytes | number of the client, 8
//	offer, the server's answer to it:       magic, 4 | address of the table, 8 | its key, 4 | buckets, 4
//	request, by SEND:                       op, 1 | 0 | length of the key, 2 | of the value, 2 | key | value
//	answer, by SEND:                        status, 1 | 7 zeros | version, 8

import (
	"encoding/binary"
	"errors"
	"slices"
)

// magic names the protocol. A change of it, or of the slots, takes another one.
const magic = 0x766b7631 // "vkv1"

const (
	helloSize   = 12
	offerSize   = 20
	requestHead = 6
	requestMax  = requestHead + MaxKey + MaxValue
	answerSize  = 16
)

var errProtocol = errors.New("the peer is not a store of this version")

func hello(client uint64) []byte {
	return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint32(nil, magic), client)
}

func parseHello(b []byte) (client uint64, err error) {
	if len(b) < helloSize || binary.BigEndian.Uint32(b) != magic {
		return 0, errProtocol
	}
	return binary.BigEndian.Uint64(b[4:]), nil
}

// offer says where the table is.
type offer struct {
	addr    uint64
	rkey    uint32
	buckets int
}

func (o offer) pack() []byte {
	b := binary.BigEndian.AppendUint32(nil, magic)
	b = binary.BigEndian.AppendUint64(b, o.addr)
	b = binary.BigEndian.AppendUint32(b, o.rkey)
	return binary.BigEndian.AppendUint32(b, uint32(o.buckets))
}

func parseOffer(b []byte) (o offer, err error) {
	if len(b) < offerSize || binary.BigEndian.Uint32(b) != magic {
		return o, errProtocol
	}
	o = offer{binary.BigEndian.Uint64(b[4:]), binary.BigEndian.Uint32(b[12:]), int(binary.BigEndian.Uint32(b[16:]))}
	if o.buckets < 1 || o.buckets > MaxBuckets {
		return o, errProtocol
	}
	return o, nil
}

// The operations of a request.
const (
	opPut    = 'P'
	opDelete = 'D'
)

type request struct {
	op    byte
	key   string
	value []byte
}

func (r *request) appendTo(b []byte) []byte {
	b = append(b, r.op, 0)
	b = binary.BigEndian.AppendUint16(b, uint16(len(r.key)))
	b = binary.BigEndian.AppendUint16(b, uint16(len(r.value)))
	return append(append(b, r.key...), r.value...)
}

// parseRequest reads a message of a client, which may be anything. The lengths must be those of the message: what lies behind it
// in the buffer is of an earlier one.
func parseRequest(b []byte) (r request, err error) {
	if len(b) < requestHead {
		return r, ErrMalformed
	}
	k, v, rest := int(binary.BigEndian.Uint16(b[2:])), int(binary.BigEndian.Uint16(b[4:])), b[requestHead:]
	switch {
	case b[0] != opPut && b[0] != opDelete, k+v != len(rest), b[0] == opDelete && v > 0:
		return r, ErrMalformed
	}
	r = request{op: b[0], key: string(rest[:k]), value: rest[k:]}
	return r, checkKey(r.key, r.value)
}

// statuses are the outcomes of a request, by the numbers that they have in an answer.
var statuses = []error{nil, ErrNotFound, ErrFull, ErrTooLong, ErrMalformed, ErrStorage}

func answer(version uint64, err error) []byte {
	b := make([]byte, answerSize)
	status := slices.IndexFunc(statuses, func(s error) bool { return errors.Is(err, s) })
	if status < 0 {
		status = len(statuses) - 1 // ErrStorage: something of the server's
	}
	b[0] = byte(status)
	binary.BigEndian.PutUint64(b[8:], version)
	return b
}

func parseAnswer(b []byte) (version uint64, err error) {
	if len(b) != answerSize || int(b[0]) >= len(statuses) {
		return 0, errProtocol
	}
	return binary.BigEndian.Uint64(b[8:]), statuses[b[0]]
}
