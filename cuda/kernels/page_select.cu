// Which pages of a KV cache one decoding step attends to, fetches ahead and gives up: one launch for a layer.
//
// A page is summed up by a digest for each KV head: a box around its keys with centre c and half width r.  For a query
// q the box bounds what any key in it can score: max over the box of q.k = sum over d of q_d c_d + |q_d| r_d.
//
//   importance   that bound, the largest over the queries that share the KV head; per query it also estimates how much
//                attention the pages left out would have got; a page in memory counts `stay` more, so that pages of
//                nearly the same importance do not take turns
//   position     the same bound for the mean query turned on by the rotary embedding's average over coming positions
//   paging       the most important pages are chosen; of the others, those that the coming positions favour fill the
//                frames that are left: what of them is not in memory is fetched ahead, and the least favoured make room
//
// Compiled for one head dimension, group size and type of digest:
//   HEAD_DIM  a multiple of 32      GROUP  queries to a KV head, 1 to 16     DIGEST  0 float, 1 bfloat16, 2 half
//
// Grid (blocks for the pages, KV heads, sequences), THREADS threads.  Each warp scores pages; the block that comes last
// for its head then decides, so nothing goes back to the host in between.

#ifndef THREADS
#define THREADS 256
#endif
#define WARPS (THREADS / 32)
#define LANE_DIMS (HEAD_DIM / 32)
#define QUERIES (GROUP + 1)
#define ALL_LANES 0xffffffffu
#define LOWEST __int_as_float(0xff7fffff)

#if DIGEST == 0
typedef float digest_t;
__device__ __forceinline__ float widen(digest_t value) { return value; }
#elif DIGEST == 1
typedef unsigned short digest_t;
__device__ __forceinline__ float widen(digest_t value) { return __uint_as_float((unsigned)value << 16); }
#else
typedef unsigned short digest_t;
__device__ __forceinline__ float widen(digest_t value) {
    // Exponent and fraction moved into place and scaled by 2^112, which is exact for subnormal numbers as well.
    float size = __uint_as_float((unsigned)(value & 0x7fff) << 13) * __uint_as_float(0x77800000u);
    return (value & 0x8000) ? -size : size;
}
#endif

enum Role { REST = 0, CHOSEN = 1, KEPT = 2 };

struct Shared {
    float query[QUERIES][HEAD_DIM];
    unsigned histogram[256];
    unsigned prefix;
    int remaining;
    int taken;
    int warp_above[WARPS];
    int warp_equal[WARPS];
    float share[GROUP];
    bool last;
};

// Unsigned integers in the order of the floats; zero is kept for "no candidate".
__device__ __forceinline__ unsigned in_order(float value) {
    unsigned bits = __float_as_uint(value + 0.f);  // the sum is no negative zero
    unsigned key = (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
    return key == 0 ? 1 : key;
}

__device__ __forceinline__ float sum_of_warp(float value) {
    for (int offset = 16; offset > 0; offset >>= 1) value += __shfl_xor_sync(ALL_LANES, value, offset);
    return value;
}

__device__ __forceinline__ float largest_of_warp(float value) {
    for (int offset = 16; offset > 0; offset >>= 1) value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, offset));
    return value;
}

// Queries of this head into shared memory; the last is the group's mean, turned by the expected rotation.
__device__ void load_queries(Shared& shared, const float* query, const float* mean_cos, const float* mean_sin) {
    for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += THREADS) shared.query[i / HEAD_DIM][i % HEAD_DIM] = query[i];
    __syncthreads();
    for (int d = threadIdx.x; d < HEAD_DIM; d += THREADS) {
        int other = d < HEAD_DIM / 2 ? d + HEAD_DIM / 2 : d - HEAD_DIM / 2;
        float mean = 0.f, turned = 0.f;
        for (int g = 0; g < GROUP; ++g) {
            mean += shared.query[g][d];
            turned += shared.query[g][other];
        }
        turned = d < HEAD_DIM / 2 ? -turned : turned;
        shared.query[GROUP][d] = (mean * mean_cos[d] + turned * mean_sin[d]) * (1.f / GROUP);
    }
    __syncthreads();
}

// Bounds of all pages of this block: one warp takes a page, its lanes the dimensions.
__device__ void score_pages(
    const Shared& shared, const digest_t* centre, const digest_t* radius, float* bounds, float* importance, float* prior,
    int num_pages, int page_stride, float scale
) {
    int lane = threadIdx.x % 32;
    float query[QUERIES][LANE_DIMS];
#pragma unroll
    for (int g = 0; g < QUERIES; ++g)
#pragma unroll
        for (int i = 0; i < LANE_DIMS; ++i) query[g][i] = shared.query[g][lane * LANE_DIMS + i];
    int step = gridDim.x * WARPS;
    for (int page = blockIdx.x * WARPS + threadIdx.x / 32; page < num_pages; page += step) {
        size_t at = (size_t)page * HEAD_DIM + lane * LANE_DIMS;
        float c[LANE_DIMS], r[LANE_DIMS];
#pragma unroll
        for (int i = 0; i < LANE_DIMS; ++i) {
            c[i] = widen(centre[at + i]);
            r[i] = widen(radius[at + i]);
        }
        float best = LOWEST;
#pragma unroll
        for (int g = 0; g < QUERIES; ++g) {
            float sum = 0.f;
#pragma unroll
            for (int i = 0; i < LANE_DIMS; ++i) sum += query[g][i] * c[i] + fabsf(query[g][i]) * r[i];
            sum = sum_of_warp(sum) * scale;
            if (g == GROUP) {
                if (lane == 0) prior[page] = sum;
            } else {
                if (lane == 0) bounds[(size_t)g * page_stride + page] = sum;
                best = fmaxf(best, sum);
            }
        }
        if (lane == 0) importance[page] = best;
    }
}

// The `want` pages with the largest keys, equal ones by page, listed in ascending order and given a role, where there is
// a list and a role to give.  Pages whose key is zero are no candidates; what is missing of `want` is filled with -1.
// Returns how many there were.
template <typename Key>
__device__ int take_largest(
    Shared& shared, Key key, int num_pages, int want, int* taken, unsigned char* role, unsigned char new_role
) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        shared.prefix = 0;
        shared.remaining = want;
    }
    // Radix selection: eight bits of the threshold at a time.
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int bin = threadIdx.x; bin < 256; bin += THREADS) shared.histogram[bin] = 0;
        __syncthreads();
        unsigned prefix = shared.prefix;
        for (int page = threadIdx.x; page < num_pages; page += THREADS) {
            unsigned k = key(page);
            bool fits = shift == 24 || (k >> ((shift + 8) & 31)) == (prefix >> ((shift + 8) & 31));
            if (k != 0 && fits) atomicAdd(&shared.histogram[(k >> shift) & 255], 1u);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int remaining = shared.remaining, bin = 255;
            // With fewer candidates than wanted this runs down to bin 0, and everything is above the threshold or on it.
            while (bin > 0 && (int)shared.histogram[bin] < remaining) remaining -= (int)shared.histogram[bin--];
            shared.remaining = remaining;
            shared.prefix = prefix | ((unsigned)bin << shift);
        }
        __syncthreads();
    }
    unsigned threshold = shared.prefix;
    int equal_left = shared.remaining;
    if (threadIdx.x == 0) shared.taken = 0;
    __syncthreads();
    // Compaction in page order; of the pages on the threshold the first ones are taken.
    for (int start = 0; start < num_pages; start += THREADS) {
        int page = start + threadIdx.x;
        unsigned k = page < num_pages ? key(page) : 0;
        bool above = k > threshold, equal = k != 0 && k == threshold;
        unsigned equals = __ballot_sync(ALL_LANES, equal);
        if (lane == 0) shared.warp_equal[warp] = __popc(equals);
        __syncthreads();
        int equal_rank = __popc(equals & ((1u << lane) - 1u)), equal_sum = 0;
        for (int w = 0; w < WARPS; ++w) {
            if (w < warp) equal_rank += shared.warp_equal[w];
            equal_sum += shared.warp_equal[w];
        }
        bool take = above || (equal && equal_rank < equal_left);
        unsigned takes = __ballot_sync(ALL_LANES, take);
        if (lane == 0) shared.warp_above[warp] = __popc(takes);
        __syncthreads();
        int rank = shared.taken + __popc(takes & ((1u << lane) - 1u)), sum = 0;
        for (int w = 0; w < WARPS; ++w) {
            if (w < warp) rank += shared.warp_above[w];
            sum += shared.warp_above[w];
        }
        if (take) {
            if (taken) taken[rank] = page;
            if (new_role != REST) role[page] = new_role;
        }
        equal_left -= min(equal_left, equal_sum);
        __syncthreads();
        if (threadIdx.x == 0) shared.taken += sum;
        __syncthreads();
    }
    int count = shared.taken;
    if (taken)
        for (int i = count + threadIdx.x; i < want; i += THREADS) taken[i] = -1;
    __syncthreads();
    return count;
}

// Share of the attention that pages without a role would get, the largest over the group's queries.  One warp, one query.
__device__ float share_left_out(
    Shared& shared, const float* bounds, const unsigned char* role, int num_pages, int page_stride
) {
    int lane = threadIdx.x % 32;
    for (int g = threadIdx.x / 32; g < GROUP; g += WARPS) {
        const float* bound = bounds + (size_t)g * page_stride;
        float top = LOWEST;
        for (int page = lane; page < num_pages; page += 32) top = fmaxf(top, bound[page]);
        top = largest_of_warp(top);
        float all = 0.f, rest = 0.f;
        for (int page = lane; page < num_pages; page += 32) {
            float mass = expf(bound[page] - top);
            all += mass;
            if (role[page] != CHOSEN) rest += mass;
        }
        all = sum_of_warp(all);
        rest = sum_of_warp(rest);
        if (lane == 0) shared.share[g] = all > 0.f ? rest / all : 0.f;
    }
    __syncthreads();
    float worst = 0.f;
    for (int g = 0; g < GROUP; ++g) worst = fmaxf(worst, shared.share[g]);
    return worst;
}

struct ByImportance {
    const float* importance;
    const unsigned char* resident;
    int num_pages, num_sinks, num_recent;
    float stay;
    __device__ unsigned operator()(int page) const {
        bool kept = page < num_sinks || page >= num_pages - num_recent;
        float value = resident[page] ? importance[page] + stay : importance[page];
        return kept ? 0xffffffffu : min(in_order(value), 0xfffffffeu);
    }
};

struct Favoured {  // not chosen
    const float* prior;
    const unsigned char* role;
    __device__ unsigned operator()(int page) const { return role[page] == CHOSEN ? 0u : in_order(prior[page]); }
};

struct KeptAndAbsent {
    const float* prior;
    const unsigned char *role, *resident;
    __device__ unsigned operator()(int page) const {
        return role[page] != KEPT || resident[page] ? 0u : in_order(prior[page]);
    }
};

struct LeastFavoured {  // in memory, and not chosen
    const float* prior;
    const unsigned char *role, *resident;
    __device__ unsigned operator()(int page) const {
        return role[page] == CHOSEN || !resident[page] ? 0u : in_order(-prior[page]);
    }
};

// All arrays are contiguous.  B sequences, H KV heads, P = page_stride pages of room, of which num_pages are complete.
//   query [B, H, GROUP, D] float        centre, radius [B, H, P, D] digest        mean_cos, mean_sin [D] float
//   resident [B, H, P] bytes, not zero where a page is in memory
//   bounds [B, H, GROUP, P], importance, prior [B, H, P] float: results, in logits (multiplied by scale)
//   role [B, H, P] bytes: result, see Role            arrived [B, H]: zero before the launch, and after it
//   chosen [B, H, num_chosen], ahead [B, H, num_ahead], victims [B, H, num_chosen + num_ahead] int: ascending, then -1
//   left_out [B, H] float
// At most num_frames pages of a head are in memory once the chosen ones and those fetched ahead have come and the victims
// have gone, where no more were there before.
extern "C" __global__ void __launch_bounds__(THREADS) page_select(
    const float* __restrict__ query, const digest_t* __restrict__ centre, const digest_t* __restrict__ radius,
    const float* __restrict__ mean_cos, const float* __restrict__ mean_sin, const unsigned char* __restrict__ resident,
    float* bounds, float* importance, float* prior, unsigned char* role, unsigned* arrived, int* chosen, int* ahead,
    int* victims, float* left_out, int num_pages, int page_stride, int num_chosen, int num_ahead, int num_frames,
    int num_sinks, int num_recent, float scale, float stay
) {
    __shared__ Shared shared;
    size_t head = (size_t)blockIdx.z * gridDim.y + blockIdx.y;
    query += head * GROUP * HEAD_DIM;
    centre += head * page_stride * HEAD_DIM;
    radius += head * page_stride * HEAD_DIM;
    resident += head * page_stride;
    bounds += head * GROUP * page_stride;
    importance += head * page_stride;
    prior += head * page_stride;
    role += head * page_stride;
    chosen += head * num_chosen;
    ahead += head * num_ahead;
    victims += head * (num_chosen + num_ahead);

    load_queries(shared, query, mean_cos, mean_sin);
    score_pages(shared, centre, radius, bounds, importance, prior, num_pages, page_stride, scale);

    __threadfence();  // this block's bounds are seen by whichever block finds that it is the last
    __syncthreads();
    if (threadIdx.x == 0) shared.last = atomicAdd(&arrived[head], 1u) == gridDim.x - 1;
    __syncthreads();
    if (!shared.last) return;
    __threadfence();

    for (int page = threadIdx.x; page < num_pages; page += THREADS) role[page] = REST;
    __syncthreads();
    int num_taken = take_largest(
        shared, ByImportance{importance, resident, num_pages, num_sinks, num_recent, stay}, num_pages, num_chosen, chosen,
        role, CHOSEN);
    float share = share_left_out(shared, bounds, role, num_pages, page_stride);

    if (threadIdx.x == 0) shared.taken = 0;
    __syncthreads();
    int own = 0;
    for (int page = threadIdx.x; page < num_pages; page += THREADS) own += role[page] == CHOSEN || resident[page];
    if (own) atomicAdd(&shared.taken, own);
    __syncthreads();
    int held = shared.taken;  // pages in memory once the choice is there
    __syncthreads();
    int num_kept = max(0, num_frames - num_taken);
    take_largest(shared, Favoured{prior, role}, num_pages, num_kept, (int*)0, role, KEPT);
    int fetched = take_largest(shared, KeptAndAbsent{prior, role, resident}, num_pages, num_ahead, ahead, role, REST);
    // No page that is kept is among these: with what is fetched, the kept ones fit.
    int surplus = max(0, min(held + fetched - num_frames, num_chosen + num_ahead));
    take_largest(shared, LeastFavoured{prior, role, resident}, num_pages, surplus, victims, role, REST);
    for (int i = surplus + threadIdx.x; i < num_chosen + num_ahead; i += THREADS) victims[i] = -1;
    if (threadIdx.x == 0) {
        left_out[head] = share;
        arrived[head] = 0;
    }
}
