package migrate

// The guest, a program for a processor without an operating system, which QEMU loads by its multiboot header. It has
// two areas of memory. Each word of the cold one has a value that follows from its address and from a seed. A word of
// the hot one has that value plus the number of the pass:
//
//	fill both areas
//	for pass := 0; ; pass++ {
//		print pass
//		for each word of the cold area: it is as it was filled
//		for each word of the hot area: it is what the last pass wrote; write it plus one
//	}
//
// So a page that arrives late or not at all is found in the next pass. The guest prints such a word's address, what it
// is and what it should be, behind a B, and stops.

import (
	"encoding/binary"
	"slices"
)

// area is a part of the guest's memory.
type area struct{ start, words uint32 }

func (a area) bytes() uint64 { return 4 * uint64(a.words) }

// The guest's memory.
const memoryMB = 96

var (
	hot  = area{16 << 20, 8 << 20 / 4}
	cold = area{32 << 20, 32 << 20 / 4}
)

// loadAt is where QEMU loads the program. The areas and the seed stand behind the header, and the code behind them.
const (
	loadAt     = 1 << 20
	headerSize = 32
	dataSize   = 20
)

// image returns the guest's program. The seed is odd, so that no two words of an area are filled with the same value.
func image(seed uint32) []byte {
	const magic, hasAddresses = 0x1BADB002, 1 << 16
	entry := uint32(loadAt + headerSize + dataSize)
	end := entry + uint32(len(code))
	var b []byte
	flags, check := uint32(hasAddresses), uint32(magic)
	check = -(check + flags)
	for _, v := range []uint32{magic, flags, check,
		loadAt, loadAt, end, end, entry, // the header's address, that of the program, its end, the end of its memory
		hot.start, hot.words, cold.start, cold.words, seed} {
		b = binary.LittleEndian.AppendUint32(b, v)
	}
	return append(b, code...)
}

// code is the program in machine code, of 32 bits. Jumps and calls are relative.
var code = slices.Concat(
	[]byte{0xfa},                         // cli
	[]byte{0xfc},                         // cld
	[]byte{0xbc, 0x00, 0x00, 0x09, 0x00}, // mov esp, 0x90000
	[]byte{0x66, 0xba, 0xfb, 0x03},       // mov dx, 0x3fb: the serial port's line control
	[]byte{0xb0, 0x03},                   // mov al, 3: 8 bits
	[]byte{0xee},                         // out dx, al

	[]byte{0x8b, 0x3d, 0x28, 0x00, 0x10, 0x00},       // mov edi, [cold.start]
	[]byte{0x8b, 0x0d, 0x2c, 0x00, 0x10, 0x00},       // mov ecx, [cold.words]
	[]byte{0x89, 0xf8},                               // fillCold: mov eax, edi
	[]byte{0x0f, 0xaf, 0x05, 0x30, 0x00, 0x10, 0x00}, // imul eax, [seed]
	[]byte{0xab},       // stosd
	[]byte{0xe2, 0xf4}, // loop fillCold
	[]byte{0x8b, 0x3d, 0x20, 0x00, 0x10, 0x00},       // mov edi, [hot.start]
	[]byte{0x8b, 0x0d, 0x24, 0x00, 0x10, 0x00},       // mov ecx, [hot.words]
	[]byte{0x89, 0xf8},                               // fillHot: mov eax, edi
	[]byte{0x0f, 0xaf, 0x05, 0x30, 0x00, 0x10, 0x00}, // imul eax, [seed]
	[]byte{0xab},       // stosd
	[]byte{0xe2, 0xf4}, // loop fillHot
	[]byte{0x31, 0xed}, // xor ebp, ebp

	[]byte{0x89, 0xe8},                               // pass: mov eax, ebp
	[]byte{0xe8, 0x65, 0x00, 0x00, 0x00},             // call print
	[]byte{0x8b, 0x3d, 0x28, 0x00, 0x10, 0x00},       // mov edi, [cold.start]
	[]byte{0x8b, 0x0d, 0x2c, 0x00, 0x10, 0x00},       // mov ecx, [cold.words]
	[]byte{0x89, 0xfa},                               // coldWord: mov edx, edi
	[]byte{0x0f, 0xaf, 0x15, 0x30, 0x00, 0x10, 0x00}, // imul edx, [seed]
	[]byte{0x39, 0x17},                               // cmp [edi], edx
	[]byte{0x75, 0x2b},                               // jne bad
	[]byte{0x83, 0xc7, 0x04},                         // add edi, 4
	[]byte{0xe2, 0xee},                               // loop coldWord
	[]byte{0x8b, 0x3d, 0x20, 0x00, 0x10, 0x00},       // mov edi, [hot.start]
	[]byte{0x8b, 0x0d, 0x24, 0x00, 0x10, 0x00},       // mov ecx, [hot.words]
	[]byte{0x89, 0xfa},                               // hotWord: mov edx, edi
	[]byte{0x0f, 0xaf, 0x15, 0x30, 0x00, 0x10, 0x00}, // imul edx, [seed]
	[]byte{0x01, 0xea},                               // add edx, ebp
	[]byte{0x39, 0x17},                               // cmp [edi], edx
	[]byte{0x75, 0x0b},                               // jne bad
	[]byte{0x42},                                     // inc edx
	[]byte{0x89, 0x17},                               // mov [edi], edx
	[]byte{0x83, 0xc7, 0x04},                         // add edi, 4
	[]byte{0xe2, 0xe9},                               // loop hotWord
	[]byte{0x45},                                     // inc ebp
	[]byte{0xeb, 0xb5},                               // jmp pass

	[]byte{0x8b, 0x37},                   // bad: mov esi, [edi]
	[]byte{0xb0, 'B'},                    // mov al, 'B'
	[]byte{0xe8, 0x37, 0x00, 0x00, 0x00}, // call put
	[]byte{0x89, 0xf8},                   // mov eax, edi
	[]byte{0xe8, 0x11, 0x00, 0x00, 0x00}, // call print
	[]byte{0x89, 0xf0},                   // mov eax, esi
	[]byte{0xe8, 0x0a, 0x00, 0x00, 0x00}, // call print
	[]byte{0x89, 0xd0},                   // mov eax, edx
	[]byte{0xe8, 0x03, 0x00, 0x00, 0x00}, // call print
	[]byte{0xf4},                         // stop: hlt
	[]byte{0xeb, 0xfd},                   // jmp stop

	[]byte{0x89, 0xc3},                   // print, eax in hexadecimal and a newline: mov ebx, eax
	[]byte{0xb9, 0x08, 0x00, 0x00, 0x00}, // mov ecx, 8
	[]byte{0xc1, 0xc3, 0x04},             // digit: rol ebx, 4
	[]byte{0x88, 0xd8},                   // mov al, bl
	[]byte{0x24, 0x0f},                   // and al, 15
	[]byte{0x04, '0'},                    // add al, '0'
	[]byte{0x3c, '9'},                    // cmp al, '9'
	[]byte{0x76, 0x02},                   // jbe decimal
	[]byte{0x04, 'a' - '9' - 1},          // add al, 'a' - '9' - 1
	[]byte{0xe8, 0x04, 0x00, 0x00, 0x00}, // decimal: call put
	[]byte{0xe2, 0xea},                   // loop digit
	[]byte{0xb0, '\n'},                   // mov al, '\n'
	[]byte{0x88, 0xc4},                   // put, the character in al: mov ah, al
	[]byte{0x66, 0xba, 0xfd, 0x03},       // mov dx, 0x3fd: the serial port's line status
	[]byte{0xec},                         // full: in al, dx
	[]byte{0xa8, 0x20},                   // test al, 0x20: there is room
	[]byte{0x74, 0xfb},                   // jz full
	[]byte{0x88, 0xe0},                   // mov al, ah
	[]byte{0x66, 0xba, 0xf8, 0x03},       // mov dx, 0x3f8
	[]byte{0xee},                         // out dx, al
	[]byte{0xc3},                         // ret
)
