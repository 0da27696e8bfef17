package link

var reasonNames = [NumReasons]string{"drop_short", "drop_opcode", "drop_bad_icrc", "drop_version",
	"drop_bad_pkey", "drop_truncated", "drop_headers"}

// String returns the name of the counter.
func (r Reason) String() string { return reasonNames[r] }
