// The input contract of mhc_ops/checks.py, with its words.

#include "contract.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <sstream>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

namespace mhc {
namespace {

constexpr int64_t kStreams = 4;
constexpr int64_t kGroup = 32;  // columns that share a scale

template <typename Items>
std::string join(const Items& items, const char* separator) {
  std::ostringstream out;
  const char* before = "";
  for (const auto& item : items) {
    out << before << item;
    before = separator;
  }
  return out.str();
}

template <typename Items>
std::string list(const Items& items) {
  return "[" + join(items, ", ") + "]";
}

// As Python prints a float: the shortest digits that read back the same.
std::string number(double value) {
  if (std::isnan(value)) {
    return "nan";
  }
  char text[32];
  const double size = std::abs(value);
  const bool fixed = value == 0 || (size >= 1e-4 && size < 1e16);
  const auto format = fixed ? std::chars_format::fixed : std::chars_format::scientific;
  std::string digits(text, std::to_chars(text, std::end(text), value, format).ptr);
  return fixed && digits.find('.') == std::string::npos ? digits + ".0" : digits;
}

std::string dtype_of(const at::Tensor& tensor) {
  return std::string(c10::getDtypeNames(tensor.scalar_type()).first);
}

template <typename Items, typename Item>
bool contains(const Items& items, const Item& item) {
  return std::find(items.begin(), items.end(), item) != items.end();
}

// Comparing a symbolic size adds a guard and leaves the size symbolic.
bool is_source(c10::SymIntArrayRef sizes, bool streams) {
  const size_t rank = streams ? 3 : 2;
  return sizes.size() == rank && (!streams || sizes[1] == kStreams) && sizes.back() != 0;
}

void check_tensor(
    const std::string& op,
    const Argument& argument,
    const at::Tensor& tensor,
    const Sizes& sizes,
    const std::string& first,
    c10::Device device) {
  const std::string start = op + ": " + argument.name + " must ";
  TORCH_CHECK_TYPE(
      contains(argument.dtypes, dtype_of(tensor)),
      start, "have dtype ", join(argument.dtypes, " or "), ", got ", dtype_of(tensor));

  const auto fits = [&](const Shape& shape) {
    return c10::SymIntArrayRef(sizes.of(shape)) == tensor.sym_sizes();
  };
  if (std::none_of(argument.shapes.begin(), argument.shapes.end(), fits)) {
    std::vector<std::string> allowed;
    for (const Shape& shape : argument.shapes) {
      allowed.push_back(list(shape) + " = " + list(sizes.of(shape)));
    }
    TORCH_CHECK_VALUE(
        false, start, "have shape ", join(allowed, " or "), ", got ", list(tensor.sym_sizes()));
  }
  TORCH_CHECK_VALUE(
      tensor.device() == device,
      start, "be on the device of ", first, ", ", device.str(), ", got ", tensor.device().str());
  TORCH_CHECK_VALUE(
      !argument.dense || tensor.is_contiguous(),
      start, "be contiguous, got strides ", list(tensor.sym_strides()),
      " for shape ", list(tensor.sym_sizes()));
}

}  // namespace

Sizes::Sizes(c10::SymInt tokens, c10::SymInt hidden)
    : tokens_(std::move(tokens)), hidden_(std::move(hidden)) {}

std::vector<c10::SymInt> Sizes::of(const Shape& shape) const {
  std::vector<c10::SymInt> sizes;
  for (const std::string& dimension : shape) {
    if (dimension == "T") {
      sizes.push_back(tokens_);
    } else if (dimension == "H") {
      sizes.push_back(hidden_);
    } else if (dimension == "K") {
      sizes.push_back(hidden_ * kStreams);
    } else if (dimension == "H / 32") {
      sizes.push_back(hidden_ / kGroup);
    } else {
      sizes.emplace_back(static_cast<int64_t>(std::stoll(dimension)));
    }
  }
  return sizes;
}

Sizes check(const Operator& op, const Call& call) {
  const std::string& name = call.schema.name();
  for (const Argument& argument : op.tensors) {
    const c10::IValue& value = call[argument.name];
    // None for a tensor that is not optional arrives as one that is not defined.
    TORCH_CHECK_VALUE(
        !value.isTensor() || value.toTensor().defined(), name, ": ", argument.name, " is missing");
  }
  const std::string& first = op.tensors.front().name;
  const at::Tensor& source = call[first].toTensor();
  const bool streams = first != "x";
  TORCH_CHECK_VALUE(
      is_source(source.sym_sizes(), streams),
      name, ": ", first, " must have shape ",
      streams ? c10::str("[T, hc_mult, H] with hc_mult = ", kStreams) : "[T, H]",
      ", got ", list(source.sym_sizes()));

  const Sizes sizes(source.sym_size(0), source.sym_size(-1));
  for (const Argument& argument : op.tensors) {
    const c10::IValue& value = call[argument.name];
    if (value.isTensor()) {
      check_tensor(name, argument, value.toTensor(), sizes, first, source.device());
    }
  }

  for (const std::string& epsilon : op.epsilons) {
    const double value = call[epsilon].toDouble();
    TORCH_CHECK_VALUE(
        std::isfinite(value) && value >= 0,
        name, ": ", epsilon, " must be finite and not negative, got ", number(value));
  }
  if (call.schema.argumentIndexWithName("sinkhorn_repeat")) {
    const int64_t repeat = call["sinkhorn_repeat"].toInt();
    TORCH_CHECK_VALUE(repeat >= 1, name, ": sinkhorn_repeat must be at least 1, got ", repeat);
  }
  if (op.quantises) {
    const c10::SymInt hidden = source.sym_size(-1);
    TORCH_CHECK_VALUE(
        hidden % kGroup == 0,
        name, ": H must be a multiple of ", kGroup, ", got H = ", hidden);
  }
  return sizes;
}

}  // namespace mhc
