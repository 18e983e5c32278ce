// The part of the product kernels that all instruction sets share: packing of B, the write-out, sums. Included once by
// each product_<isa>.cc, inside namespace concerto::cpu and an anonymous namespace: nothing here may have a name that
// another translation unit sees, for the linker would keep one of the two bodies. For the same reason no inline
// function of another header is called.
//
// The including file defines before:
//   kUnit; kRows (mr); kVectors (nr / kLanes); Vec with kLanes, the f32 of a vector
// and declares before and defines after:
//   pack_block<S, kStream = false>(from, stride, n, k, to, row_words): to[w][j] = word w of row j, for up to kLanes rows j < n and words
//   of k elements; writes kLanes words of each, in ascending order, zero for rows that are not there.
//   pack_lines<S, kWidth, kStream = false>(from, stride, n, k, to): to[w][j] = word w of column j, for kWidth columns, zero from n on,
//   and the words of k <= kLinesAtOnce * kUnit elements; may write up to kPanelGap - 1 words more.
// With kStream, for which `to` begins at a cache line, they may store past the caches.
// Writes of a word row may spill into the next, which is written later (or is the gap): hence words in ascending order
// everywhere.

struct [[gnu::may_alias]] Bits16 {
  uint16_t bits;
};
struct [[gnu::may_alias]] Bits32 {
  uint32_t bits;
};

constexpr int64_t kLanes = Vec::kLanes;
constexpr int64_t kLinesAtOnce = 4;
constexpr int64_t kColumns = kLanes * kVectors;

constexpr int64_t words_of(int64_t k) { return (k + kUnit - 1) / kUnit; }
constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

inline float to_float(Bits16 x) { return __builtin_bit_cast(float, static_cast<uint32_t>(x.bits) << 16); }
inline float to_float(Bits32 x) { return __builtin_bit_cast(float, x.bits); }
inline void from_float(float value, Bits32* out) { out->bits = __builtin_bit_cast(uint32_t, value); }
inline void from_float(float value, Bits16* out) {  // nearest even, NaN stays NaN
  const uint32_t u = __builtin_bit_cast(uint32_t, value);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  out->bits = static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40u : rounded);
}

// One word of an element, and of its partner where words are pairs.
inline uint32_t word_of(Bits32 low, Bits32) { return low.bits; }
inline uint32_t word_of(Bits16 low, Bits16 high) {
  return kUnit == 2 ? static_cast<uint32_t>(low.bits) | static_cast<uint32_t>(high.bits) << 16
                    : static_cast<uint32_t>(low.bits) << 16;
}

template <class S, int64_t kWidth, bool kStream = false>
void pack_cols(const S* from, int64_t stride, int64_t n, int64_t k, uint32_t* packed, int64_t panel_words) {
  constexpr int64_t kAhead = 16, kStep = kLinesAtOnce * kUnit;
  for (int64_t i = 0; i < k; i += kStep, from += kStep * stride, packed += kLinesAtOnce * kWidth) {
    const int64_t rows = smaller(kStep, k - i);
    if (i + kAhead < k)  // short pieces of far rows: no processor fetches these ahead by itself
      for (int64_t q = 0; q < kStep; ++q)
        for (int64_t j = 0; j < n; j += 64 / static_cast<int64_t>(sizeof(S)))
          __builtin_prefetch(from + (kAhead + q) * stride + j);
    uint32_t* to = packed;
    for (int64_t j = 0; j < n; j += kWidth, to += panel_words)
      pack_lines<S, kWidth, kStream>(from + j, stride, smaller(kWidth, n - j), rows, to);
  }
}

template <class S, bool kStream = false>
void pack_b_cols(const void* b, int64_t stride, int64_t n, int64_t k, uint32_t* packed, int64_t panel_words) {
  pack_cols<S, kColumns, kStream>(static_cast<const S*>(b), stride, n, k, packed, panel_words);
}

template <class S, bool kStream = false>
void pack_b_rows(const void* b, int64_t stride, int64_t n, int64_t k, uint32_t* packed, int64_t panel_words) {
  for (int64_t j = 0; j < n; j += kColumns, packed += panel_words)
    for (int64_t v = 0; v < kColumns; v += kLanes) {
      const int64_t lanes = n - j - v < 0 ? 0 : smaller(kLanes, n - j - v);
      const S* from = static_cast<const S*>(b) + (lanes ? (j + v) * stride : 0);
      for (int64_t i = 0; i < k; i += kLanes * kUnit)
        pack_block<S, kStream>(from + i, stride, lanes, smaller(k - i, kLanes * kUnit),
                               packed + i / kUnit * kColumns + v, kColumns);
    }
}

template <class D>
void store(const float* c, int64_t c_stride, int64_t rows, int64_t cols, const float* bias, void* out,
           int64_t out_stride, bool accumulate) {
  constexpr int64_t kAhead = 4;
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = c + r * c_stride;
    D* to = static_cast<D*>(out) + r * out_stride;
    if (r + kAhead < rows)
      for (int64_t j = 0; j < cols; j += 64 / static_cast<int64_t>(sizeof(D)))
        __builtin_prefetch(to + kAhead * out_stride + j, 1);
    if (bias && accumulate) {
      for (int64_t j = 0; j < cols; ++j) from_float(to_float(to[j]) + (from[j] + bias[j]), to + j);
    } else if (bias) {
      for (int64_t j = 0; j < cols; ++j) from_float(from[j] + bias[j], to + j);
    } else if (accumulate) {
      for (int64_t j = 0; j < cols; ++j) from_float(to_float(to[j]) + from[j], to + j);
    } else {
      for (int64_t j = 0; j < cols; ++j) from_float(from[j], to + j);
    }
  }
}

template <class S>
void column_sums(const void* x, int64_t stride, int64_t rows, int64_t cols, float* sums) {
  constexpr int64_t kWidth = 64, kBlock = 64;
  float part[kWidth];
  for (int64_t j = 0; j < cols; j += kWidth) {
    const int64_t width = smaller(kWidth, cols - j);
    for (int64_t r = 0; r < rows; r += kBlock) {
      const int64_t end = smaller(rows, r + kBlock);
      for (int64_t i = 0; i < width; ++i) part[i] = 0;
      for (int64_t q = r; q < end; ++q) {
        const S* from = static_cast<const S*>(x) + q * stride + j;
        for (int64_t i = 0; i < width; ++i) part[i] += to_float(from[i]);
      }
      for (int64_t i = 0; i < width; ++i) sums[j + i] += part[i];
    }
  }
}

inline void fetch_some(Ahead* a) {
  if (!a) return;
  for (int64_t line = 0; line < a->lines && a->row < a->rows; ++line) {
    __builtin_prefetch(a->data + (a->index ? a->index[a->row] : a->row) * a->stride + a->byte, 0, 2);
    a->byte += 64;
    if (a->byte < a->bytes) continue;
    a->byte = 0;
    ++a->row;
  }
}

// The two, word by word: for edges, and for instruction sets without a better way.
template <class S>
inline void pack_block_plain(const S* from, int64_t stride, int64_t n, int64_t k, uint32_t* to, int64_t row_words) {
  for (int64_t i = 0; i < k; i += kUnit, to += row_words) {
    for (int64_t j = 0; j < n; ++j) {
      const S* p = from + j * stride + i;
      to[j] = word_of(p[0], i + 1 < k ? p[1] : S{0});
    }
    for (int64_t j = n; j < kLanes; ++j) to[j] = 0;
  }
}

template <class S, int64_t kWidth>
inline void pack_lines_plain(const S* from, int64_t stride, int64_t n, int64_t k, uint32_t* to) {
  static const S kNoRow[kWidth] = {};
  for (int64_t i = 0; i < k; i += kUnit, from += kUnit * stride, to += kWidth) {
    const S* high = i + 1 < k ? from + stride : kNoRow;  // read if words are pairs
    if (n == kWidth) {                                   // a count that the compiler knows
      for (int64_t j = 0; j < kWidth; ++j) to[j] = word_of(from[j], high[j]);
    } else {
      for (int64_t j = 0; j < n; ++j) to[j] = word_of(from[j], high[j]);
      for (int64_t j = n; j < kWidth; ++j) to[j] = 0;
    }
  }
}

constexpr ProductKernels shared_table() {
  ProductKernels t = {};
  t.unit = kUnit;
  t.mr = kRows;
  t.nr = static_cast<int>(kColumns);
  t.pack_b_rows[kSourceBF16] = pack_b_rows<Bits16>;
  t.pack_b_cols[kSourceBF16] = pack_b_cols<Bits16>;
  if constexpr (kUnit == 2) {  // weights are kept packed
    t.stream_b_rows = pack_b_rows<Bits16, true>;
    t.stream_b_cols = pack_b_cols<Bits16, true>;
  }
  if constexpr (kUnit == 1) {
    t.pack_b_rows[kSourceF32] = pack_b_rows<Bits32>;
    t.pack_b_cols[kSourceF32] = pack_b_cols<Bits32>;
  }
  t.store[kSourceF32] = store<Bits32>;
  t.store[kSourceBF16] = store<Bits16>;
  t.column_sums[kSourceF32] = column_sums<Bits32>;
  t.column_sums[kSourceBF16] = column_sums<Bits16>;
  return t;
}
