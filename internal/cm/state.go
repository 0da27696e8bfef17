package cm

import "strconv"

// State is the state of a Conn: enum ib_cm_state of Linux, for the states in which a Conn exists.
type State uint8

const (
	Idle        State = iota // over
	ReqSent                  // active: REQ sent
	MRAReqRcvd               // active: the peer's program has the REQ
	RepRcvd                  // active: REP came, the program has not seen it
	MRARepSent               // active: the program has the REP; a duplicate is answered by MRA
	ReqRcvd                  // passive: REQ came, the program has not seen it
	MRAReqSent               // passive: the program has the REQ; a duplicate is answered by MRA
	RepSent                  // passive: REP sent
	MRARepRcvd               // passive: the peer's program has the REP
	Established              //
	DreqSent                 // the program has disconnected
	DreqRcvd                 // the peer has disconnected, the program has to
	TimeWait                 // over, but packets may still be under way
	SIDRReqSent              // active, datagrams
	SIDRReqRcvd              // passive, datagrams
	numStates
)

var stateNames = [numStates]string{"idle", "REQ sent", "MRA of REQ received", "REP received", "MRA of REP sent",
	"REQ received", "MRA of REQ sent", "REP sent", "MRA of REP received", "established", "DREQ sent", "DREQ received",
	"time wait", "SIDR_REQ sent", "SIDR_REQ received"}

func (s State) String() string {
	if s < numStates {
		return stateNames[s]
	}
	return "state " + strconv.Itoa(int(s))
}
