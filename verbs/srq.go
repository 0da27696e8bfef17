package verbs

import "github.com/verbena-rdma/verbena/internal/provider"

// SRQConfig is what a shared receive queue is made of.
type SRQConfig struct {
	MaxWR  int // outstanding receives; at least 1
	MaxSGE int // pieces of each receive. Zero: receives of messages without data
	Limit  int // see [SRQ.SetLimit]. Zero: no limit

	// XRCD makes it a queue for XRC: it serves the targets of that domain, and no
	// queue pair may name it in its [QPConfig]. Nil: an ordinary shared receive queue.
	XRCD *XRCD
	CQ   *CQ // with XRCD: where its receives complete
}

// SRQAttr are the attributes of a shared receive queue.
type SRQAttr struct {
	MaxWR  int // outstanding receives that fit
	MaxSGE int // pieces of each receive; cannot be modified
	Limit  int // 0 if no limit is set, or it has been reached
}

// SRQAttrMask is which fields of an SRQAttr [SRQ.Modify] sets, as IBV_SRQ_*.
type SRQAttrMask uint8

const (
	SRQMaskMaxWR SRQAttrMask = 1 << iota
	SRQMaskLimit
)

// SRQ is a shared receive queue. See ibv_create_srq(3).
type SRQ struct {
	p provider.SRQ
}

func (s *SRQ) ok() bool { return s != nil && s.p != nil }

// Number returns the queue's number, as in [AsyncEvent]; for XRC, peers put it into
// RemoteSRQN. See ibv_get_srq_num(3).
func (s *SRQ) Number() uint32 { return s.p.Number() }

// PostRecv adds receives to the queue, in order, and returns how many it took.
// If that is fewer than len(wrs), it is the index of the first bad one, and err
// says what is wrong with it; those before it are posted. The queue copies the
// requests: the caller may use the slices again at once, and the memory that they name
// when the receive has completed. See ibv_post_srq_recv(3).
//
// Errors: EINVAL if a request has more pieces than MaxSGE, or the queue is nil or
// closed; ENOMEM if the queue is full.
func (s *SRQ) PostRecv(wrs []RecvWR) (int, error) {
	if !s.ok() {
		return 0, invalid("post_srq_recv", "nil shared receive queue")
	}
	return s.p.PostRecv(wrs)
}

// Modify sets those attributes that the mask names, all of them or none. See
// ibv_modify_srq(3), [SRQ.SetLimit] and [SRQ.Resize].
//
// Errors: EINVAL if MaxWR is less than 1, less than the number of receives in
// the queue, less than the limit or more than MaxSRQWR in [DeviceAttr], Limit
// is negative or more than the number of receives that fit, the mask has
// unknown bits, or the queue is nil.
func (s *SRQ) Modify(attr SRQAttr, mask SRQAttrMask) error {
	const op = "modify_srq"
	maxWR, limit := -1, -1 // the provider's "keep"
	switch {
	case !s.ok():
		return invalid(op, "nil shared receive queue")
	case mask&^(SRQMaskMaxWR|SRQMaskLimit) != 0:
		return invalid(op, "unknown attribute in the mask")
	}
	if mask&SRQMaskMaxWR != 0 {
		if maxWR = attr.MaxWR; maxWR < 0 {
			return invalid(op, "negative MaxWR")
		}
	}
	if mask&SRQMaskLimit != 0 {
		if limit = attr.Limit; limit < 0 {
			return invalid(op, "negative limit")
		}
	}
	return s.p.Modify(maxWR, limit)
}

// SetLimit arms the queue's limit: when fewer than n receives are left, the
// device raises one [EventSRQLimitReached] and the limit is 0 again. The device
// compares when a message takes a receive: if fewer than n are left already, the
// next message raises the event. Zero disarms the limit.
//
// Errors: those of [SRQ.Modify].
func (s *SRQ) SetLimit(n int) error { return s.Modify(SRQAttr{Limit: n}, SRQMaskLimit) }

// Resize makes room for at least n receives. What is in the queue stays there.
//
// Errors: those of [SRQ.Modify].
func (s *SRQ) Resize(n int) error { return s.Modify(SRQAttr{MaxWR: n}, SRQMaskMaxWR) }

// Query returns the queue's attributes. See ibv_query_srq(3).
//
// Errors: EINVAL for a nil queue.
func (s *SRQ) Query() (SRQAttr, error) {
	if !s.ok() {
		return SRQAttr{}, invalid("query_srq", "nil shared receive queue")
	}
	maxWR, maxSGE, limit, err := s.p.Query()
	if err != nil {
		return SRQAttr{}, err
	}
	return SRQAttr{MaxWR: maxWR, MaxSGE: maxSGE, Limit: limit}, nil
}

// Close destroys the queue; receives in it are dropped without a completion. It is
// idempotent. See ibv_destroy_srq(3).
//
// Errors: EBUSY while a queue pair uses the queue; EINVAL for a nil queue.
func (s *SRQ) Close() error {
	if !s.ok() {
		return invalid("destroy_srq", "nil shared receive queue")
	}
	return s.p.Close()
}
