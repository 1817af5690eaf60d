// x [T, in] times one matrix of a stack [L, in, out], read where it lies.
//
// XLA's scan over layers copies each layer's matrices out of their stack before it multiplies, and at the row counts
// of decoding its product runs at half of what the cores can do. Here a panel of columns is worked through in blocks
// of inputs: a block comes from memory once, while the first rows are multiplied, and is in the cache for the others.
// Every sum runs over the inputs in order, so a row's result does not depend on the other rows.

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <string>

#include "shared.h"

namespace {

constexpr int64_t kPanel = kTileVectors * kLanes;
constexpr int64_t kDepth = 128;  // inputs of a block; of float32 it has 32 KiB and stays in the L1 cache
constexpr int64_t kRows = 128;   // rows of one item: many rows make more items, which are shared out more evenly

template <typename W>
void Multiply(ffi::ThreadPool& pool, const float* x, const W* w, float* out, int64_t rows, int64_t inputs,
              int64_t outputs) {
  static const std::array<float, kRows> ones = [] {
    std::array<float, kRows> values;
    values.fill(1.0f);
    return values;
  }();
  const int64_t panels = (outputs + kPanel - 1) / kPanel, heights = (rows + kRows - 1) / kRows;
  ParallelFor(pool, panels * heights, [&](int64_t item) {
    const int64_t column = item / heights * kPanel, row = item % heights * kRows;
    const int64_t width = std::min(kPanel, outputs - column), height = std::min(kRows, rows - row);
    for (int64_t k = 0; k < inputs; k += kDepth) {
      const int64_t depth = std::min(kDepth, inputs - k);
      const W* next = k + depth < inputs ? w + (k + depth) * outputs + column : nullptr;
      Product(x + row * inputs + k, inputs, w + k * outputs + column, outputs, out + row * outputs + column, outputs,
              height, width, depth, k ? ones.data() : nullptr, next);
    }
  });
}

// x float32 [T, in]; w [L, in, out]: float32, bfloat16, or its bits as uint16; layer [1]. Result float32 [T, out].
ffi::Error Linear(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w, ffi::Buffer<ffi::S32> layer,
                  ffi::Result<ffi::Buffer<ffi::F32>> out) {
  const auto dims = w.dimensions();
  if (x.dimensions().size() != 2 || dims.size() != 3 || x.dimensions()[1] != dims[1]) {
    return ffi::Error::InvalidArgument("linear: the shapes do not fit");
  }
  const int64_t rows = x.dimensions()[0], inputs = dims[1], outputs = dims[2];
  const int64_t first = layer.typed_data()[0] * inputs * outputs;
  auto multiply = [&](auto storage) {
    using W = decltype(storage);
    Multiply(pool, x.typed_data(), static_cast<const W*>(w.untyped_data()) + first, out->typed_data(), rows, inputs,
             outputs);
  };
  try {
    switch (w.element_type()) {
      case ffi::DataType::F32: multiply(float{}); break;
      case ffi::DataType::U16:
      case ffi::DataType::BF16: multiply(BFloat16{}); break;
      default: return ffi::Error::InvalidArgument("linear: weights must be float32 or bfloat16");
    }
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string("linear: ") + error.what());
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(linear, Linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
