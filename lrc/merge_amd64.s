#include "textflag.h"

// func mergeBlocks(dst, base *byte, versions *[]byte, count, n int) (overlap int)
//
// For each 64 bytes, in two halves of 32:
//
//	Y0 Y1   base
//	Y2 Y3   merged so far
//	Y4 Y5   0xff where no version changed the byte so far
//	Y6 Y7   0xff where two versions disagree
//	Y8..Y13 the version at hand, where it equals base, where it equals what was merged
TEXT ·mergeBlocks(SB), NOSPLIT, $0-48
	MOVQ dst+0(FP), DI
	MOVQ base+8(FP), SI
	MOVQ versions+16(FP), R8
	MOVQ count+24(FP), R9
	MOVQ n+32(FP), R10
	XORQ AX, AX              // overlap
	XORQ BX, BX              // offset of the block

block:
	VMOVDQU  (SI)(BX*1), Y0
	VMOVDQU  32(SI)(BX*1), Y1
	VMOVDQA  Y0, Y2
	VMOVDQA  Y1, Y3
	VPCMPEQB Y4, Y4, Y4
	VPCMPEQB Y5, Y5, Y5
	VPXOR    Y6, Y6, Y6
	VPXOR    Y7, Y7, Y7
	MOVQ     R8, R11
	MOVQ     R9, R12

version:
	MOVQ      (R11), R13
	ADDQ      $24, R11        // the next slice header
	VMOVDQU   (R13)(BX*1), Y8
	VMOVDQU   32(R13)(BX*1), Y9
	VPCMPEQB  Y8, Y0, Y10     // as in base
	VPCMPEQB  Y9, Y1, Y11
	VPCMPEQB  Y8, Y2, Y12     // as merged
	VPCMPEQB  Y9, Y3, Y13
	VPOR      Y10, Y12, Y12   // no conflict: as in base, as merged,
	VPOR      Y11, Y13, Y13
	VPOR      Y4, Y12, Y12    // or the first to change the byte
	VPOR      Y5, Y13, Y13
	VPCMPEQB  Y14, Y14, Y14
	VPANDN    Y14, Y12, Y12
	VPANDN    Y14, Y13, Y13
	VPOR      Y12, Y6, Y6
	VPOR      Y13, Y7, Y7
	VPBLENDVB Y10, Y2, Y8, Y2 // where as in base, keep what was merged
	VPBLENDVB Y11, Y3, Y9, Y3
	VPAND     Y10, Y4, Y4
	VPAND     Y11, Y5, Y5
	DECQ      R12
	JNZ       version

	VMOVDQU   Y2, (DI)(BX*1)
	VMOVDQU   Y3, 32(DI)(BX*1)
	VPMOVMSKB Y6, R12
	VPMOVMSKB Y7, R13
	SHLQ      $32, R13
	ORQ       R13, R12
	POPCNTQ   R12, R12
	ADDQ      R12, AX
	ADDQ      $64, BX
	CMPQ      BX, R10
	JLT       block

	VZEROUPPER
	MOVQ AX, overlap+40(FP)
	RET
