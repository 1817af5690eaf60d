// What the native kernels share: vectors of floats, numbers as they are stored, a small matrix product, and XLA's
// threads. Vectors are the compiler's own (GCC and Clang), so that one source serves every instruction set.

#ifndef KERNELS_PALLAS_CPU_NATIVE_SHARED_H_
#define KERNELS_PALLAS_CPU_NATIVE_SHARED_H_

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <thread>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kTileRows = 6;  // 6 x 4 accumulators, 4 operands and a few to spare: 32 registers
#else
constexpr int kLanes = 8;
constexpr int kTileRows = 3;  // 3 x 4 accumulators in 16 registers
#endif
constexpr int kTileVectors = 4;

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t UVec __attribute__((vector_size(kLanes * 4)));
typedef float VecAt __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef uint16_t HalvesAt __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));
typedef uint8_t BytesAt __attribute__((vector_size(kLanes), aligned(1), may_alias));
typedef int8_t SignedBytesAt __attribute__((vector_size(kLanes), aligned(1), may_alias));

// What pages hold besides float: the bits of smaller numbers. The last two are multiplied by a row's scale.
struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };
struct Int8 { int8_t bits; };
struct Float8 { uint8_t bits; };  // e4m3fn

template <typename P>
constexpr bool kScaled = std::is_same_v<P, Int8> || std::is_same_v<P, Float8>;

inline Vec Splat(float x) { return x - Vec{}; }

// a * b + c, fused wherever it is used or nowhere: left to the compiler, that depends on the loop around it (for some
// CPUs GCC splits the multiply-adds of short chains), and a row's bits would depend on the tile that it falls into.
#if defined(__AVX512F__)
inline Vec MultiplyAdd(Vec a, Vec b, Vec c) { return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#elif defined(__AVX__) && defined(__FMA__)
inline Vec MultiplyAdd(Vec a, Vec b, Vec c) { return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#else
inline Vec MultiplyAdd(Vec a, Vec b, Vec c) {
#ifdef __FP_FAST_FMAF
#pragma GCC unroll 8
  for (int i = 0; i < kLanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}
#endif

inline Vec Load(const float* p) { return *reinterpret_cast<const VecAt*>(p); }

inline Vec Load(const BFloat16* p) {
  UVec wide = __builtin_convertvector(*reinterpret_cast<const HalvesAt*>(p), UVec) << 16;
  return (Vec)wide;
}

// kLanes bytes or halves, widened. GCC makes one instruction a lane of the portable way.
#if defined(__AVX512F__)
inline IVec Widen(const int8_t* p) { return (IVec)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline UVec Widen(const uint8_t* p) { return (UVec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline Vec WidenHalves(const void* p) { return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
#elif defined(__AVX2__) && defined(__F16C__)
inline IVec Widen(const int8_t* p) { return (IVec)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
inline UVec Widen(const uint8_t* p) { return (UVec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
inline Vec WidenHalves(const void* p) { return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
#else
inline IVec Widen(const int8_t* p) {
  return __builtin_convertvector(*reinterpret_cast<const SignedBytesAt*>(p), IVec);
}
inline UVec Widen(const uint8_t* p) { return __builtin_convertvector(*reinterpret_cast<const BytesAt*>(p), UVec); }
inline Vec WidenHalves(const void* p) {
  UVec bits = __builtin_convertvector(*static_cast<const HalvesAt*>(p), UVec);
  UVec size = bits & 0x7fff;
  Vec normal = (Vec)((size << 13) + (112u << 23)), endless = (Vec)((size << 13) + (224u << 23));
  Vec small = __builtin_convertvector((IVec)size, Vec) * (1.0f / (1 << 24));
  Vec value = (IVec)size < 0x400 ? small : (IVec)size < 0x7c00 ? normal : endless;
  return (Vec)((UVec)value | (bits & 0x8000) << 16);
}
#endif

inline Vec Load(const Int8* p) { return __builtin_convertvector(Widen(&p->bits), Vec); }

// Numbers below 2^-6 have no leading 1: m * 2^-9. XLA's threads flush float32 denormals, so no trick makes both.
inline Vec Load(const Float8* p) {
  UVec bits = Widen(&p->bits);
  UVec size = bits & 0x7f;
  Vec normal = (Vec)((size << 20) + (120u << 23));
  Vec small = __builtin_convertvector((IVec)size, Vec) * (1.0f / 512);
  Vec value = (IVec)size < 8 ? small : normal;
  return (Vec)((UVec)value | (bits & 0x80) << 24);
}

inline Vec Load(const Float16* p) { return WidenHalves(p); }

inline void Store(float* p, Vec x) { *reinterpret_cast<VecAt*>(p) = x; }

inline float ToFloat(float x) { return x; }
inline float ToFloat(BFloat16 x) {
  uint32_t wide = uint32_t{x.bits} << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

inline float ToFloat(Float16 x) {
  const int exponent = x.bits >> 10 & 31, mantissa = x.bits & 1023;
  float size = exponent ? std::ldexp(1.0f + mantissa / 1024.0f, exponent - 15) : std::ldexp(float(mantissa), -24);
  if (exponent == 31) size = mantissa ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
  return x.bits & 0x8000 ? -size : size;
}

inline float ToFloat(Int8 x) { return x.bits; }
inline float ToFloat(Float8 x) {
  const int exponent = x.bits >> 3 & 15, mantissa = x.bits & 7;
  const float size = exponent ? std::ldexp(1.0f + mantissa / 8.0f, exponent - 7) : mantissa / 512.0f;
  return x.bits & 0x80 ? -size : size;
}

inline void FromFloat(float x, float* to) { *to = x; }
inline void FromFloat(float x, BFloat16* to) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) {
    to->bits = static_cast<uint16_t>((bits >> 16) | 0x40);
  } else {
    to->bits = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to nearest, ties to even
  }
}

// To nearest, ties to even.
inline void FromFloat(float x, Float16* to) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000;
  uint32_t size = bits & 0x7fffffff;
  if (x != x) {
    size = 0x7e00;
  } else if (size >= 0x47800000 - 0x1000) {  // half a step below 2^16
    size = 0x7c00;
  } else if (size >= 113u << 23) {
    size = (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13;
  } else {  // below 2^-14 multiples of 2^-24
    size = static_cast<uint32_t>(std::nearbyint(std::fabs(x) * float(1 << 24)));
  }
  to->bits = static_cast<uint16_t>(sign | size);
}

// c[R, C vectors] = c * keep[R] + a[R, depth] b[depth, C vectors]; keep null: c starts at 0. The sum over depth
// runs in order, so a row's result does not depend on how many rows are computed together. `ahead`, if not null, is
// where the reading goes on afterwards: as much of it is fetched into the cache as is read of b.
template <int R, int C, typename B>
inline void ProductTile(const float* a, int64_t lda, const B* b, int64_t ldb, float* c, int64_t ldc, int64_t depth,
                        const float* keep, const B* ahead) {
  Vec sums[R][C];
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) sums[i][j] = keep ? Load(c + i * ldc + j * kLanes) * keep[i] : Vec{};
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vec row[C];
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) row[j] = Load(b + k * ldb + j * kLanes);
    if (ahead) {
#pragma GCC unroll 8
      for (int j = 0; j < C; ++j) __builtin_prefetch(ahead + k * ldb + j * kLanes);
    }
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
      Vec factor = Splat(a[i * lda + k]);
#pragma GCC unroll 8
      for (int j = 0; j < C; ++j) sums[i][j] = MultiplyAdd(factor, row[j], sums[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) Store(c + i * ldc + j * kLanes, sums[i][j]);
  }
}

// Calls tile with the tallest of these heights that fits, until no row is left; tile moves `i` on.
template <int... Heights, typename Tile>
void ForTiles(int64_t rows, int64_t& i, const Tile& tile) {
  auto while_fits = [&](auto height) {
    while (rows - i >= decltype(height)::value) tile(height);
  };
  (while_fits(std::integral_constant<int, Heights>{}), ...);
}

template <int C, typename B>
void ProductColumns(const float* a, int64_t lda, const B* b, int64_t ldb, float* c, int64_t ldc, int64_t rows,
                    int64_t depth, const float* keep, const B* ahead) {
  int64_t i = 0;
  auto tile = [&](auto height) {
    constexpr int R = decltype(height)::value;
    ProductTile<R, C>(a + i * lda, lda, b, ldb, c + i * ldc, ldc, depth, keep ? keep + i : nullptr,
                      i == 0 ? ahead : nullptr);
    i += R;
  };
  ForTiles<kTileRows, 3, 2, 1>(rows, i, tile);
}

// c[rows, columns] = c * keep[rows] + a[rows, depth] b[depth, columns].
template <typename B>
void Product(const float* a, int64_t lda, const B* b, int64_t ldb, float* c, int64_t ldc, int64_t rows,
             int64_t columns, int64_t depth, const float* keep, const B* ahead) {
  int64_t j = 0;
  auto columns_of = [&](auto vectors) {
    constexpr int C = decltype(vectors)::value;
    ProductColumns<C>(a, lda, b + j, ldb, c + j, ldc, rows, depth, keep, ahead ? ahead + j : nullptr);
    j += C * kLanes;
  };
  while (columns - j >= kTileVectors * kLanes) columns_of(std::integral_constant<int, kTileVectors>{});
  while (columns - j >= kLanes) columns_of(std::integral_constant<int, 1>{});
  for (; j < columns; ++j) {  // unusual page sizes and head dims
    for (int64_t i = 0; i < rows; ++i) {
      float sum = keep ? c[i * ldc + j] * keep[i] : 0.0f;
      for (int64_t k = 0; k < depth; ++k) sum += a[i * lda + k] * ToFloat(b[k * ldb + j]);
      c[i * ldc + j] = sum;
    }
  }
}

// Runs fn(0) .. fn(n - 1) on the pool and the calling thread. Tasks that start late touch nothing but `shared`.
template <typename Fn>
void ParallelFor(ffi::ThreadPool& pool, int64_t n, const Fn& fn) {
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
    std::atomic<bool> failed{false};
    int64_t n;
    const Fn* fn;
    void Work() {
      for (int64_t i; (i = next.fetch_add(1)) < n; done.fetch_add(1, std::memory_order_release)) {
        try {
          (*fn)(i);
        } catch (...) {
          failed.store(true);
        }
      }
    }
  };
  auto shared = std::make_shared<Shared>();
  shared->n = n;
  shared->fn = &fn;
  int64_t helpers = std::min<int64_t>(n, pool.num_threads()) - 1;
  try {
    for (int64_t i = 0; i < helpers; ++i) pool.Schedule([shared] { shared->Work(); });
  } catch (const std::bad_alloc&) {  // fewer helpers do too; those that began use what lives here
  }
  shared->Work();
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < n; ++spins) {
    if (spins > 1000) std::this_thread::yield();
  }
  if (shared->failed) throw std::bad_alloc();
}

}  // namespace

#endif  // KERNELS_PALLAS_CPU_NATIVE_SHARED_H_
