// Paged attention for CPUs, called by XLA through its foreign function interface.
//
// One call writes the step's K/V rows into their pages and attends, for every sequence of a ragged batch. The
// work is cut into items: a tile of query rows of one sequence, the query heads of one kv head, and a span of
// its context. XLA's own threads take items from a shared counter, the longest first. An item walks its span in
// steps of kStep tokens with an online softmax (Milakov and Gimelshein, 2018; Dao et al., 2022). Both products
// of a step are small matrix products over rows that lie contiguously in a page, because keys are kept
// transposed: scores[row, token] = q[row, :] . k[:, token] and out[row, :] += weights[row, token] v[token, :].
//
// A row's result depends on its own query and context alone: not on its neighbours, on how the batch was cut
// into tiles, nor on the number of threads. Spans are cut at fixed positions and combined in order.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <string>
#include <vector>

#include "shared.h"

namespace {

constexpr int kStep = 64;          // tokens of context between two updates of the running maximum
constexpr int kSpan = 8 * kStep;   // tokens of context that one item of a decode row covers
constexpr int kPrefillRows = 96;   // query rows times heads of one prefill item: its scores stay in the L1 cache
constexpr int kWriteRows = 32;     // token rows written by one item

// Token rows (q, k, v and the output) come in one of three types, told apart at run time: they are a small part of
// what is read, and code for every pair of types would take the compiler three times as long.
enum class Type { kFloat32, kBFloat16, kFloat16 };

int64_t SizeOf(Type type) { return type == Type::kFloat32 ? 4 : 2; }

void ReadRow(Type type, const void* from, int64_t at, int64_t n, float factor, float* to) {
  auto read = [&](auto x) {
    const auto* row = static_cast<const decltype(x)*>(from) + at;
    for (int64_t i = 0; i < n; ++i) to[i] = ToFloat(row[i]) * factor;
  };
  if (type == Type::kFloat32) return read(float{});
  if (type == Type::kBFloat16) return read(BFloat16{});
  read(Float16{});
}

void WriteRow(Type type, const float* from, int64_t n, float factor, void* to, int64_t at) {
  auto write = [&](auto x) {
    auto* row = static_cast<decltype(x)*>(to) + at;
    for (int64_t i = 0; i < n; ++i) FromFloat(from[i] * factor, row + i);
  };
  if (type == Type::kFloat32) return write(float{});
  if (type == Type::kBFloat16) return write(BFloat16{});
  write(Float16{});
}

// exp for x <= 0: degree 6 on [-ln 2 / 2, ln 2 / 2], within 2 units in the last place; exactly 0 below the
// smallest normal number; NaN stays NaN.
inline Vec Exp(Vec x) {
  const Vec lowest = Splat(-87.3365f);
  IVec gone = x < lowest;
  x = gone ? lowest : x;
  const Vec shift = Splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Vec n = MultiplyAdd(x, Splat(1.44269504f), shift);
  IVec exponent = (IVec)n << 23;
  n -= shift;
  Vec r = MultiplyAdd(n, Splat(-0.693359375f), x);
  r = MultiplyAdd(n, Splat(2.12194440e-4f), r);
  Vec p = Splat(1.3888889e-3f);
  p = MultiplyAdd(p, r, Splat(8.3333333e-3f));
  p = MultiplyAdd(p, r, Splat(4.1666667e-2f));
  p = MultiplyAdd(p, r, Splat(1.6666667e-1f));
  p = MultiplyAdd(p, r, Splat(0.5f));
  p = MultiplyAdd(p, r, Splat(1.0f));
  p = MultiplyAdd(p, r, Splat(1.0f));
  return gone ? Vec{} : (Vec)((IVec)p + exponent);
}

inline Vec Max(Vec a, Vec b) { return a > b ? a : b; }

inline float Largest(Vec x) {
  float lanes[kLanes];
  Store(lanes, x);
  for (int width = kLanes / 2; width > 0; width /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  }
  return lanes[0];
}

inline float Sum(Vec x) {
  float lanes[kLanes];
  Store(lanes, x);
  for (int width = kLanes / 2; width > 0; width /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

struct Call {
  int64_t heads, kv_heads, head_dim, group, page_size, pages_per_seq, num_seqs, num_decode, num_tokens;
  const int32_t *tables, *kv_lens, *query_starts, *query_lens;
  int64_t first_page, window;   // window 0: all of the context
  float scale, softcap;         // softcap 0: none
  const float* sinks;           // null: none
  Type type;                    // of q and out, and of k and v unless they come quantised
  const void *q, *k, *v;
  void* out;
  const float *k_scales, *v_scales;       // [T, K]; null: not quantised
  float *pool_k_scales, *pool_v_scales;   // [pages, K, N]
};

// Rows `row .. row + rows` of the token axis, all of `seq`, the first at `position`; tokens `begin .. end` of its
// context. `part`: where the unnormalised result goes; -1: this is the only span, and the output is final.
struct Item {
  int64_t seq, kv_head, row, rows, position, begin, end, part;
};

// Of a row of one head: acc[head_dim], then top and total.
int64_t PartSize(const Call& call) { return call.head_dim + 2; }

struct Scratch {
  std::vector<float> q, scores, acc, top, keep, total, wide;
};

// c[rows, columns] = c * keep[rows] + a[rows, depth] b[depth, columns], as Product. Numbers of 8 bits take longer to
// widen than to multiply with, so for more than one tile of rows that is done once, into `wide`.
template <typename P>
void PageProduct(const float* a, int64_t lda, const P* b, int64_t ldb, float* c, int64_t ldc, int64_t rows,
                 int64_t columns, int64_t depth, const float* keep, const P* ahead, std::vector<float>& wide) {
  if constexpr (kScaled<P>) {
    if (rows > kTileRows) {
      wide.resize(depth * columns);
      for (int64_t k = 0; k < depth; ++k) {
        int64_t j = 0;
        for (; j + kLanes <= columns; j += kLanes) Store(&wide[k * columns + j], Load(b + k * ldb + j));
        for (; j < columns; ++j) wide[k * columns + j] = ToFloat(b[k * ldb + j]);
      }
      Product<float>(a, lda, wide.data(), columns, c, ldc, rows, columns, depth, keep, nullptr);
      return;
    }
  }
  Product(a, lda, b, ldb, c, ldc, rows, columns, depth, keep, ahead);
}

template <typename P>
void WritePages(const Call& call, int64_t first, int64_t last, P* pool_k, P* pool_v) {
  const int64_t K = call.kv_heads, D = call.head_dim, N = call.page_size;
  std::vector<float> row_of_head(D);
  auto write = [&](int64_t row, int64_t seq, int64_t position) {
    const int64_t page = call.first_page + call.tables[seq * call.pages_per_seq + position / N];
    const int64_t at = position % N;
    for (int64_t h = 0; h < K; ++h) {
      const int64_t place = page * K + h;
      if constexpr (kScaled<P>) {
        const P* key = static_cast<const P*>(call.k) + (row * K + h) * D;
        for (int64_t d = 0; d < D; ++d) pool_k[(place * D + d) * N + at] = key[d];
        std::memcpy(pool_v + (place * N + at) * D, static_cast<const P*>(call.v) + (row * K + h) * D, D);
        call.pool_k_scales[place * N + at] = call.k_scales[row * K + h];
        call.pool_v_scales[place * N + at] = call.v_scales[row * K + h];
      } else {
        ReadRow(call.type, call.k, (row * K + h) * D, D, 1.0f, row_of_head.data());
        for (int64_t d = 0; d < D; ++d) FromFloat(row_of_head[d], pool_k + (place * D + d) * N + at);
        ReadRow(call.type, call.v, (row * K + h) * D, D, 1.0f, row_of_head.data());
        for (int64_t d = 0; d < D; ++d) FromFloat(row_of_head[d], pool_v + (place * N + at) * D + d);
      }
    }
  };
  for (int64_t seq = 0; seq < call.num_seqs; ++seq) {
    const int64_t start = call.query_starts[seq], count = call.query_lens[seq];
    const int64_t from = std::max(first, start), to = std::min(last, start + count);
    for (int64_t row = from; row < to; ++row) write(row, seq, call.kv_lens[seq] - count + row - start);
  }
}

template <typename P>
void Attend(const Call& call, const Item& item, const P* pool_k, const P* pool_v, float* parts) {
  static thread_local Scratch scratch;
  const int64_t G = call.group, D = call.head_dim, N = call.page_size, K = call.kv_heads, H = call.heads;
  const int64_t rows = item.rows * G;  // row r: token row r / G, head r % G of the kv head's group
  scratch.q.resize(rows * D);
  scratch.acc.assign(rows * D, 0.0f);
  scratch.scores.resize(rows * kStep);
  scratch.keep.resize(rows);
  scratch.top.assign(rows, -1e20f);  // above what masked scores are set to: their weights are exactly 0
  scratch.total.assign(rows * kLanes, 0.0f);
  float* const scores = scratch.scores.data();

  for (int64_t r = 0; r < rows; ++r) {
    ReadRow(call.type, call.q, ((item.row + r / G) * H + item.kv_head * G + r % G) * D, D, call.scale,
            &scratch.q[r * D]);
  }

  const int32_t* table = call.tables + item.seq * call.pages_per_seq;
  for (int64_t at = item.begin; at < item.end; at += kStep) {
    const int64_t tokens = std::min<int64_t>(kStep, item.end - at);
    // The step's pages, or its part of one page. Columns beyond `tokens` are computed and masked.
    const int64_t width = std::min<int64_t>(kStep, N);
    for (int64_t n = 0; n < tokens; n += width) {
      int64_t page = call.first_page + table[(at + n) / N];
      const int64_t place = page * K + item.kv_head;
      PageProduct(scratch.q.data(), D, pool_k + place * D * N + (at + n) % N, N, scores + n, kStep, rows, width, D,
                  nullptr, pool_v + (place * N + (at + n) % N) * D, scratch.wide);
    }

    float k_scales[kStep], v_scales[kStep];
    if constexpr (kScaled<P>) {
      for (int64_t n = 0; n < tokens; n += width) {
        const int64_t page = call.first_page + table[(at + n) / N];
        const int64_t place = (page * K + item.kv_head) * N + (at + n) % N;
        std::memcpy(k_scales + n, call.pool_k_scales + place, width * sizeof(float));
        std::memcpy(v_scales + n, call.pool_v_scales + place, width * sizeof(float));
      }
    }

    // Every row sees the whole step unless it is at the border of what the causal mask or the window leaves.
    const int64_t last = item.position + item.rows - 1;
    const bool ragged = tokens < kStep || at + kStep - 1 > item.position ||
                        (call.window && at <= last - call.window);
    for (int64_t r = 0; r < rows; ++r) {
      float* row = scores + r * kStep;
      if constexpr (kScaled<P>) {
        for (int64_t n = 0; n < kStep; n += kLanes) Store(row + n, Load(row + n) * Load(k_scales + n));
      }
      if (call.softcap > 0) {
        for (int64_t n = 0; n < kStep; n += kLanes) {
          Vec x = Load(row + n) * (1.0f / call.softcap);
          // tanh(x) = sign(x) (1 - e) / (1 + e) with e = exp(-2 |x|)
          Vec size = x < Vec{} ? -x : x;
          Vec e = Exp(size * -2.0f);
          Vec t = (Splat(1.0f) - e) / (Splat(1.0f) + e);
          Store(row + n, (x < Vec{} ? -t : t) * call.softcap);
        }
      }
      if (ragged) {
        int64_t position = item.position + r / G;
        int64_t first = call.window ? std::max<int64_t>(0, position - call.window + 1 - at) : 0;
        int64_t end = std::min(tokens, position + 1 - at);
        for (int64_t n = 0; n < kStep; ++n) {
          if (n < first || n >= end) row[n] = -1e30f;
        }
      }
      Vec high = Load(row);
      for (int64_t n = kLanes; n < kStep; n += kLanes) high = Max(Load(row + n), high);
      const float top = std::max(scratch.top[r], Largest(high));
      Vec total{};
      for (int64_t n = 0; n < kStep; n += kLanes) {
        Vec weight = Exp(Load(row + n) - top);
        total += weight;
        if constexpr (kScaled<P>) weight *= Load(v_scales + n);
        Store(row + n, weight);
      }
      const float keep = Exp(Splat(scratch.top[r] - top))[0];
      scratch.top[r] = top;
      scratch.keep[r] = keep;
      Store(&scratch.total[r * kLanes], MultiplyAdd(Load(&scratch.total[r * kLanes]), Splat(keep), total));
    }

    for (int64_t n = 0; n < tokens; n += width) {
      int64_t page = call.first_page + table[(at + n) / N];
      const int64_t next = std::min(at + n + kStep, item.end - 1) / N;
      const P* values = pool_v + ((page * K + item.kv_head) * N + (at + n) % N) * D;
      const P* next_keys = pool_k + ((call.first_page + table[next]) * K + item.kv_head) * D * N;
      // Rows of a page beyond the context may hold anything, NaN included: they are left out, not weighted by 0.
      if (n > 0) std::fill(scratch.keep.begin(), scratch.keep.end(), 1.0f);
      PageProduct(scores + n, kStep, values, D, scratch.acc.data(), D, rows, D, std::min(width, tokens - n),
                  scratch.keep.data(), next_keys, scratch.wide);
    }
  }

  for (int64_t r = 0; r < rows; ++r) {
    float total = Sum(Load(&scratch.total[r * kLanes]));
    const float* acc = &scratch.acc[r * D];
    if (item.part >= 0) {
      float* to = parts + (item.part + r) * PartSize(call);
      std::memcpy(to, acc, D * sizeof(float));
      to[D] = scratch.top[r];
      to[D + 1] = total;
      continue;
    }
    int64_t head = item.kv_head * G + r % G;
    float factor = 1.0f / total;
    if (call.sinks) {
      float top = std::max(scratch.top[r], call.sinks[head]);
      float keep = std::exp(scratch.top[r] - top);
      factor = keep / (total * keep + std::exp(call.sinks[head] - top));
    }
    WriteRow(call.type, acc, D, factor, call.out, ((item.row + r / G) * H + head) * D);
  }
}

// One decode row and the heads of one kv head: `spans` parts, one behind the other in blocks of `group` rows.
void Combine(const Call& call, int64_t row, int64_t kv_head, int64_t part, int64_t spans, const float* parts) {
  const int64_t D = call.head_dim, G = call.group, size = PartSize(call);
  std::vector<float> sum(D);
  for (int64_t g = 0; g < G; ++g) {
    int64_t head = kv_head * G + g;
    auto at = [&](int64_t span) { return parts + (part + span * G + g) * size; };
    float top = call.sinks ? call.sinks[head] : -std::numeric_limits<float>::infinity();
    for (int64_t s = 0; s < spans; ++s) top = std::max(top, at(s)[D]);
    float total = call.sinks ? std::exp(call.sinks[head] - top) : 0.0f;
    for (int64_t s = 0; s < spans; ++s) total += at(s)[D + 1] * std::exp(at(s)[D] - top);
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (int64_t s = 0; s < spans; ++s) {
      const float weight = std::exp(at(s)[D] - top);
      for (int64_t d = 0; d < D; ++d) sum[d] += at(s)[d] * weight;
    }
    WriteRow(call.type, sum.data(), D, 1.0f / total, call.out, (row * call.heads + head) * D);
  }
}

struct Join {
  int64_t row, kv_head, part, spans;
};

template <typename P>
void Run(ffi::ThreadPool& pool, const Call& call, P* pool_k, P* pool_v) {
  const int64_t writes = (call.num_tokens + kWriteRows - 1) / kWriteRows;
  ParallelFor(pool, writes, [&](int64_t i) {
    WritePages(call, i * kWriteRows, std::min((i + 1) * kWriteRows, call.num_tokens), pool_k, pool_v);
  });

  std::vector<Item> items;
  std::vector<Join> joins;
  int64_t parts = 0, next_row = 0;
  const int64_t row_bytes = call.heads * call.head_dim * SizeOf(call.type);
  auto clear_rows = [&](int64_t from, int64_t to) {  // padding
    if (to > from) std::memset(static_cast<char*>(call.out) + from * row_bytes, 0, (to - from) * row_bytes);
  };
  for (int64_t seq = 0; seq < call.num_seqs; ++seq) {
    const int64_t count = call.query_lens[seq], start = call.query_starts[seq], kv_len = call.kv_lens[seq];
    if (count == 0) continue;
    clear_rows(next_row, start);
    next_row = start + count;
    const bool decode = seq < call.num_decode;
    const int64_t height = decode ? 1 : std::max<int64_t>(1, kPrefillRows / call.group);
    for (int64_t row = 0; row < count; row += height) {
      const int64_t rows = std::min(height, count - row);
      const int64_t position = kv_len - count + row, end = position + rows;
      const int64_t begin = call.window ? std::max<int64_t>(0, position - call.window + 1) / kStep * kStep : 0;
      const int64_t spans = decode ? (end - 1) / kSpan - begin / kSpan + 1 : 1;
      for (int64_t head = 0; head < call.kv_heads; ++head) {
        if (spans == 1) {
          items.push_back({seq, head, start + row, rows, position, begin, end, -1});
          continue;
        }
        joins.push_back({start, head, parts, spans});
        for (int64_t from = begin; from < end;) {
          int64_t to = std::min(end, (from / kSpan + 1) * kSpan);
          items.push_back({seq, head, start, 1, position, from, to, parts});
          parts += call.group;
          from = to;
        }
      }
    }
  }
  clear_rows(next_row, call.num_tokens);

  auto cost = [](const Item& item) { return item.rows * (item.end - item.begin); };
  std::stable_sort(items.begin(), items.end(), [&](const Item& a, const Item& b) { return cost(a) > cost(b); });
  std::vector<float> partial(parts * PartSize(call));
  ParallelFor(pool, items.size(), [&](int64_t i) {
    Attend(call, items[i], pool_k, pool_v, partial.data());
  });
  ParallelFor(pool, joins.size(), [&](int64_t i) {
    Combine(call, joins[i].row, joins[i].kv_head, joins[i].part, joins[i].spans, partial.data());
  });
}

// q [T, H, D]; k, v [T, K, D] and pool_k [pages, K, D, N], pool_v [pages, K, N, D] of `pool_type`: 0 float32, 1 bfloat16,
// 2 float16 (then k and v are of q's type and are rounded here), 3 int8, 4 float8_e4m3fn, with scales [T, K] and
// [pages, K, N], which are empty otherwise. tables [S, pages_per_seq]; kv_lens, query_starts, query_lens [S];
// layer, window [1]; sinks [H] or [0]. Results: out like q, and the pools, which are the operands' own memory.
ffi::Error PagedAttention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                          ffi::AnyBuffer pool_k, ffi::AnyBuffer pool_v, ffi::Buffer<ffi::F32> pool_k_scales,
                          ffi::Buffer<ffi::F32> pool_v_scales, ffi::Buffer<ffi::F32> k_scales,
                          ffi::Buffer<ffi::F32> v_scales, ffi::Buffer<ffi::S32> tables,
                          ffi::Buffer<ffi::S32> kv_lens, ffi::Buffer<ffi::S32> query_starts,
                          ffi::Buffer<ffi::S32> query_lens, ffi::Buffer<ffi::S32> layer,
                          ffi::Buffer<ffi::S32> window, ffi::Buffer<ffi::F32> sinks,
                          ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> new_k,
                          ffi::Result<ffi::AnyBuffer> new_v, ffi::Result<ffi::Buffer<ffi::F32>> new_k_scales,
                          ffi::Result<ffi::Buffer<ffi::F32>> new_v_scales, int64_t num_pages, int64_t num_decode,
                          float scale, float softcap, int64_t pool_type) {
  auto dims = q.dimensions();
  auto value_dims = pool_v.dimensions();
  if (dims.size() != 3 || value_dims.size() != 4 || new_k->untyped_data() != pool_k.untyped_data() ||
      new_v->untyped_data() != pool_v.untyped_data()) {
    return ffi::Error::InvalidArgument("paged attention: wrong ranks, or the pool is not updated in place");
  }
  Call call{};
  call.num_tokens = dims[0];
  call.heads = dims[1];
  call.head_dim = dims[2];
  call.kv_heads = value_dims[1];
  call.page_size = value_dims[2];
  call.group = call.heads / call.kv_heads;
  call.num_seqs = tables.dimensions()[0];
  call.pages_per_seq = tables.dimensions()[1];
  call.num_decode = num_decode;
  call.tables = tables.typed_data();
  call.kv_lens = kv_lens.typed_data();
  call.query_starts = query_starts.typed_data();
  call.query_lens = query_lens.typed_data();
  call.first_page = layer.typed_data()[0] * num_pages;
  call.window = window.typed_data()[0];
  call.scale = scale;
  call.softcap = softcap;
  call.sinks = sinks.dimensions()[0] ? sinks.typed_data() : nullptr;
  call.q = q.untyped_data();
  call.k = k.untyped_data();
  call.v = v.untyped_data();
  call.out = out->untyped_data();
  switch (q.element_type()) {
    case ffi::DataType::F32: call.type = Type::kFloat32; break;
    case ffi::DataType::BF16: call.type = Type::kBFloat16; break;
    case ffi::DataType::F16: call.type = Type::kFloat16; break;
    default: return ffi::Error::InvalidArgument("paged attention: q must be float32, bfloat16 or float16");
  }
  call.k_scales = k_scales.typed_data();
  call.v_scales = v_scales.typed_data();
  call.pool_k_scales = new_k_scales->typed_data();
  call.pool_v_scales = new_v_scales->typed_data();
  auto run = [&](auto storage) {
    using P = decltype(storage);
    Run(pool, call, static_cast<P*>(new_k->untyped_data()), static_cast<P*>(new_v->untyped_data()));
  };
  try {
    switch (pool_type) {
      case 0: run(float{}); break;
      case 1: run(BFloat16{}); break;
      case 2: run(Float16{}); break;
      case 3: run(Int8{}); break;
      case 4: run(Float8{}); break;
      default: return ffi::Error::InvalidArgument("paged attention: unknown pool type");
    }
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string("paged attention: ") + error.what());
  }
  return ffi::Error::Success();
}

// Results as the allocator gives them. A large one is fresh from the system, which finds memory for it only where it
// is written: a pool takes up what its pages in use need, and no time to make.
ffi::Error Uninitialized(ffi::RemainingRets) { return ffi::Error::Success(); }

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(uninitialized, Uninitialized, ffi::Ffi::Bind().RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    paged_attention, PagedAttention,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>()
        .Arg<ffi::Buffer<ffi::F32>>().Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>().Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::S32>>().Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::S32>>().Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::S32>>().Arg<ffi::Buffer<ffi::S32>>().Arg<ffi::Buffer<ffi::F32>>()
        .Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>()
        .Ret<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>()
        .Attr<int64_t>("num_pages").Attr<int64_t>("num_decode")
        .Attr<float>("scale").Attr<float>("softcap").Attr<int64_t>("pool_type"));
