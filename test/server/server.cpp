// A program without Python that uses the operators, as test_csrc_meta.py drives it:
//   server LIBRARY            runs every operator on the meta device and prints its results
//   server LIBRARY PACKAGE    loads an AOTInductor package and runs it for 1 and for 7 tokens
// LIBRARY is libmhc_meta, or "-" to go without.

#include <dlfcn.h>

#include <iostream>
#include <map>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/library.h>

namespace {

constexpr int64_t kHidden = 256;

at::Tensor example(const std::string& name, int64_t tokens, c10::Device device, bool folded) {
  const int64_t k = folded ? kHidden : 4 * kHidden;
  const std::map<std::string, std::pair<std::vector<int64_t>, at::ScalarType>> examples = {
      {"x", {{tokens, kHidden}, at::kBFloat16}},
      {"residual", {{tokens, 4, kHidden}, at::kBFloat16}},
      {"residual_out", {{tokens, 4, kHidden}, at::kBFloat16}},
      {"sublayer_out", {{tokens, kHidden}, at::kBFloat16}},
      {"post_layer_mix", {{tokens, 4, 1}, at::kFloat}},
      {"comb_res_mix", {{tokens, 4, 4}, at::kFloat}},
      {"pre_mix", {{tokens, 4}, at::kFloat}},
      {"fn", {{24, k}, at::kFloat}},
      {"hc_scale", {{3}, at::kFloat}},
      {"hc_base", {{24}, at::kFloat}},
      {"norm_weight", {{kHidden}, at::kBFloat16}},
  };
  const auto& [sizes, dtype] = examples.at(name);
  return at::ones(sizes, at::TensorOptions(device).dtype(dtype));
}

torch::jit::Stack inputs(const c10::FunctionSchema& schema, int64_t tokens, c10::Device device) {
  torch::jit::Stack stack;
  const bool folded = schema.arguments().front().name() == "x";
  for (const auto& argument : schema.arguments()) {
    if (argument.type()->isSubtypeOf(*c10::OptionalType::ofTensor())) {
      stack.emplace_back(example(argument.name(), tokens, device, folded));
    } else if (argument.default_value()) {
      stack.push_back(*argument.default_value());
    } else if (argument.type()->kind() == c10::TypeKind::FloatType) {
      stack.emplace_back(1e-6);
    } else {
      stack.emplace_back(20);
    }
  }
  return stack;
}

std::vector<c10::OperatorHandle> operators() {
  std::vector<c10::OperatorHandle> found;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("mhc::", 0) == 0) {
      found.push_back(dispatcher.findSchema(name).value());
    }
  }
  return found;
}

void show(const at::Tensor& tensor) {
  std::cout << " " << c10::getDtypeNames(tensor.scalar_type()).first << tensor.sizes()
            << tensor.strides() << "@" << tensor.device();
}

// Stands in for a backend that the server brings: the n-th result is all n.
void fill(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  torch::jit::Stack meta;
  for (const auto& value : torch::jit::last(*stack, count)) {
    meta.push_back(value.isTensor() ? c10::IValue(value.toTensor().to(at::kMeta)) : value);
  }
  op.callBoxed(meta);
  torch::jit::drop(*stack, count);
  for (size_t i = 0; i < meta.size(); ++i) {
    const at::Tensor& made = meta[i].toTensor();
    const auto options = made.options().device(at::kCPU);
    stack->emplace_back(at::full(made.sizes(), static_cast<double>(i + 1), options));
  }
}

void run_on_meta() {
  for (const auto& op : operators()) {
    auto stack = inputs(op.schema(), 5, at::kMeta);
    op.callBoxed(stack);
    std::cout << op.schema().name();
    for (const auto& result : stack) {
      show(result.toTensor());
    }
    std::cout << "\n";
  }
}

void run_package(const char* path) {
  torch::Library backend(torch::Library::IMPL, "mhc", c10::DispatchKey::CPU, __FILE__, __LINE__);
  for (const auto& op : operators()) {
    backend.impl(op.schema().name().c_str(), torch::CppFunction::makeFromBoxedFunction<&fill>());
  }
  torch::inductor::AOTIModelPackageLoader loader(path);
  for (const int64_t tokens : {1, 7}) {
    std::vector<at::Tensor> given;
    for (const char* name : {"residual", "fn", "sublayer_out", "post_layer_mix", "comb_res_mix"}) {
      given.push_back(example(name, tokens, at::kCPU, false));
    }
    for (const auto& result : loader.run(given)) {
      show(result);
      std::cout << " " << result.min().item<double>() << ".." << result.max().item<double>();
    }
    std::cout << "\n";
  }
}

}  // namespace

int main(int count, char** arguments) {
  const std::string library = arguments[1];
  if (library != "-" && dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    std::cerr << dlerror() << "\n";
    return 2;
  }
  try {
    c10::InferenceMode inference;
    count == 2 ? run_on_meta() : run_package(arguments[2]);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
