#include "textflag.h"

// func fetchAdd(p *uint64, n uint64) (orig uint64)
TEXT ·fetchAdd(SB), NOSPLIT, $0-24
	MOVD p+0(FP), R0
	MOVD n+8(FP), R1
again:
	LDAXR (R0), R2
	ADD R1, R2, R3
	STLXR R3, (R0), R4
	CBNZ R4, again
	MOVD R2, orig+16(FP)
	RET

// func compareSwap(p *uint64, compare, swap uint64) (orig uint64)
TEXT ·compareSwap(SB), NOSPLIT, $0-32
	MOVD p+0(FP), R0
	MOVD compare+8(FP), R1
	MOVD swap+16(FP), R2
again:
	LDAXR (R0), R3
	CMP R1, R3
	BNE differs
	STLXR R2, (R0), R4
	CBNZ R4, again
differs:
	MOVD R3, orig+24(FP)
	RET
