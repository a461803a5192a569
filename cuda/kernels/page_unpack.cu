// Pages of bfloat16 numbers from the three quarters of their bytes that they travel in.  The format, and the code that
// packs them on the host, are in fmstream/core/page_pack.py.
//
// Compiled for one size of page:  ELEMENTS  a multiple of 512
//
// Grid (pages), THREADS threads.  A thread takes four elements of either half of a block at a time; exponents that are
// listed are set when all others of the page are there.

#ifndef THREADS
#define THREADS 256
#endif
#define BLOCK 512
#define HALF (BLOCK / 2)
#define CODES_AT ELEMENTS
#define BASES_AT (ELEMENTS + ELEMENTS / 2)
#define LIST_AT ((BASES_AT + ELEMENTS / BLOCK + 3) / 4 * 4)
#define PACKED_BYTES (LIST_AT + 4 * (1 + ELEMENTS / 128))

// Bits of one number: its byte of sign and fraction, its code, the base of its block.
__device__ __forceinline__ unsigned number(unsigned sign, unsigned code, unsigned base) {
    unsigned exponent = code ? base + code : 0;
    return ((sign & 128) << 8) | (sign & 127) | (exponent << 7);
}

// Four bytes of signs and fractions and four codes, from bit `shift` of each byte on, to four numbers.
__device__ __forceinline__ void write_four(unsigned short* target, unsigned signs, unsigned codes, int shift,
                                           unsigned base) {
    unsigned found[4];
    for (int i = 0; i < 4; ++i) found[i] = number((signs >> 8 * i) & 255, (codes >> (8 * i + shift)) & 15, base);
    unsigned* words = (unsigned*)target;
    words[0] = found[0] | found[1] << 16;
    words[1] = found[2] | found[3] << 16;
}

extern "C" __global__ void __launch_bounds__(THREADS)
page_unpack(const unsigned char* __restrict__ packed, unsigned short* __restrict__ pages) {
    const unsigned char* source = packed + (size_t)blockIdx.x * PACKED_BYTES;
    unsigned short* target = pages + (size_t)blockIdx.x * ELEMENTS;
    for (int at = threadIdx.x; at < ELEMENTS / 8; at += THREADS) {
        int block = at / (HALF / 4), first = block * BLOCK + at % (HALF / 4) * 4;
        unsigned codes = *(const unsigned*)(source + CODES_AT + at * 4);
        unsigned base = source[BASES_AT + block];
        write_four(target + first, *(const unsigned*)(source + first), codes, 0, base);
        write_four(target + first + HALF, *(const unsigned*)(source + first + HALF), codes, 4, base);
    }
    __syncthreads();
    const int* list = (const int*)(source + LIST_AT);
    for (int at = threadIdx.x; at < list[0]; at += THREADS) {
        unsigned entry = list[1 + at];
        unsigned short* place = target + (entry >> 8);
        *place = (*place & 0x807f) | (entry & 255) << 7;
    }
}
