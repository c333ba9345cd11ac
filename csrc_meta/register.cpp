// Registers the operators' schemas, Meta kernels and inference-only guards with PyTorch.

#include "contract.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>
#include <torch/library.h>

namespace mhc {
namespace {

const std::vector<Operator>& operators() {
  static const std::vector<Operator> all = {
#include "operators.inc"
  };
  return all;
}

class MetaKernel final : public c10::OperatorKernel {
 public:
  explicit MetaKernel(const Operator& op) : op_(op) {}

  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const auto& schema = handle.schema();
    const size_t count = schema.arguments().size();
    const Call call{schema, torch::jit::last(*stack, count)};
    const Sizes sizes = check(op_, call);
    const auto options = call[op_.tensors.front().name].toTensor().options();
    const bool ue8m0 = !op_.quantises || call["ue8m0"].toBool();
    torch::jit::Stack results;
    for (const Result& result : op_.results) {
      const auto& name = ue8m0 ? result.dtype : result.dtype_without_ue8m0;
      const auto dtype = c10::getStringToDtypeMap().at(name);
      results.emplace_back(at::empty_symint(sizes.of(result.shape), options.dtype(dtype)));
    }
    torch::jit::drop(*stack, count);
    for (auto& result : results) {
      stack->push_back(std::move(result));
    }
  }

 private:
  const Operator& op_;
};

// The Autograd key, as in mhc_ops/registration.py: without it gradients would silently be lost.
void guard(
    const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& schema = handle.schema();
  const auto values = torch::jit::last(*stack, schema.arguments().size());
  std::vector<at::Tensor> written;
  for (size_t i = 0; i < values.size(); ++i) {
    if (!values[i].isTensor()) {
      continue;
    }
    const at::Tensor& tensor = values[i].toTensor();
    TORCH_CHECK(
        !(c10::GradMode::is_enabled() && tensor.requires_grad()),
        schema.name(), " is inference only and an input requires grad: ",
        "call it under torch.no_grad() or torch.inference_mode()");
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      written.push_back(tensor);
    }
  }
  handle.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  for (const at::Tensor& tensor : written) {
    if (!tensor.is_inference()) {
      tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
}

// Whether none of the operators is registered yet. If all are, with the schemas of this library,
// there is nothing left to do; if not, the library or what was there first is of another version.
bool may_register() {
  size_t same = 0;
  std::string other;
  for (const Operator& op : operators()) {
    const auto wanted = torch::jit::parseSchema("mhc::" + op.schema);
    const auto found = c10::Dispatcher::singleton().findSchema({wanted.name(), ""});
    if (!found) {
      continue;
    } else if (found->schema() == wanted) {
      ++same;
    } else {
      other = c10::str(": ", found->schema(), " is not ", wanted);
    }
  }
  if (!other.empty() || (same != 0 && same != operators().size())) {
    TORCH_WARN(
        "libmhc_meta is of another version than the mhc operators that this process has, ",
        "and registers nothing", other);
    return false;
  }
  return same == 0;
}

// Nothing may be thrown from here: while a library loads, an exception ends the process.
TORCH_LIBRARY_FRAGMENT(mhc, m) {
  if (!may_register()) {
    return;
  }
  for (const Operator& op : operators()) {
    const std::string name = op.schema.substr(0, op.schema.find('('));
    m.def(op.schema.c_str(), op.tags);
    m.impl(
        name.c_str(),
        torch::dispatch(
            c10::DispatchKey::Meta,
            torch::CppFunction::makeFromBoxedFunctor(std::make_unique<MetaKernel>(op))));
    m.impl(
        name.c_str(),
        torch::dispatch(
            c10::DispatchKey::Autograd, torch::CppFunction::makeFromBoxedFunction<&guard>()));
  }
}

}  // namespace
}  // namespace mhc
