#include "textflag.h"

// func fetchAdd(p *uint64, n uint64) (orig uint64)
TEXT ·fetchAdd(SB), NOSPLIT, $0-24
	MOVQ p+0(FP), BX
	MOVQ n+8(FP), AX
	LOCK
	XADDQ AX, 0(BX)
	MOVQ AX, orig+16(FP)
	RET

// func compareSwap(p *uint64, compare, swap uint64) (orig uint64)
TEXT ·compareSwap(SB), NOSPLIT, $0-32
	MOVQ p+0(FP), BX
	MOVQ compare+8(FP), AX
	MOVQ swap+16(FP), CX
	LOCK
	CMPXCHGQ CX, 0(BX)
	MOVQ AX, orig+24(FP)
	RET
