// What the operators take and return, as mhc_ops states it; the data is in operators.inc, which
// generate.py writes.

#pragma once

#include <string>
#include <vector>

#include <ATen/core/enum_tag.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <c10/core/SymInt.h>

namespace mhc {

// Dimensions are "T", "H", "K" (4 * H), "H / 32" or a number.
using Shape = std::vector<std::string>;

struct Argument {
  std::string name;
  std::vector<Shape> shapes;
  std::vector<std::string> dtypes;
  bool dense;  // must be contiguous
};

struct Result {
  Shape shape;
  std::string dtype;
  std::string dtype_without_ue8m0;
};

struct Operator {
  std::string schema;
  std::vector<at::Tag> tags;
  std::vector<Argument> tensors;  // in the order in which they are checked; the first has T and H
  std::vector<std::string> epsilons;
  bool quantises;  // has ue8m0; H must be a multiple of 32
  std::vector<Result> results;
};

// A call from the dispatcher.
struct Call {
  const c10::FunctionSchema& schema;
  c10::ArrayRef<c10::IValue> values;

  const c10::IValue& operator[](const std::string& name) const {
    return values[schema.argumentIndexWithName(name).value()];
  }
};

// The size of every dimension of a call. Symbolic sizes stay symbolic.
class Sizes {
 public:
  Sizes(c10::SymInt tokens, c10::SymInt hidden);
  std::vector<c10::SymInt> of(const Shape& shape) const;

 private:
  c10::SymInt tokens_;
  c10::SymInt hidden_;
};

// Throws what mhc_ops/checks.py raises. What that says of addresses and of GPUs is not here: a
// Meta kernel sees neither.
Sizes check(const Operator& op, const Call& call);

}  // namespace mhc
