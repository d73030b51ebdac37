// Autocast: what runs in the lower precision, and what in float32, as on other accelerators.
//
// By hand and boxed: torch's own macros for this need the header of every operation there is, which takes longer to
// compile than all the rest.
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

namespace at::autocast {
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
TORCH_API Tensor cached_cast(at::ScalarType to_type, const Tensor& tensor, c10::DeviceType device_type);
}  // namespace at::autocast

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

constexpr const char* kLowerPrecision[] = {
    "_convolution", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "addbmm", "addmm", "addmv", "addr", "baddbmm",
    "bmm", "chain_matmul", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d.input",
    "conv_transpose3d.input", "convolution", "einsum", "gru_cell", "linalg_multi_dot", "linear", "lstm_cell", "matmul",
    "mm", "mv", "prelu", "rnn_relu_cell", "rnn_tanh_cell", "scaled_dot_product_attention"};

constexpr const char* kFloat32[] = {
    "acos", "asin", "binary_cross_entropy_with_logits", "cdist", "cosh", "cosine_embedding_loss", "cosine_similarity",
    "cross_entropy_loss", "cumprod", "cumsum", "dist", "erfinv", "exp", "expm1", "group_norm", "hinge_embedding_loss",
    "huber_loss", "kl_div", "l1_loss", "layer_norm", "log", "log10", "log1p", "log2", "log_softmax.int",
    "margin_ranking_loss", "mse_loss", "multi_margin_loss", "multilabel_margin_loss", "nll_loss", "nll_loss2d",
    "norm.Scalar", "norm.ScalarOpt_dim", "pdist", "poisson_nll_loss", "pow.Scalar", "pow.Tensor_Scalar",
    "pow.Tensor_Tensor", "prod", "prod.dim_int", "reciprocal", "renorm", "rsqrt", "sinh", "smooth_l1_loss",
    "soft_margin_loss", "softmax.int", "softplus", "sum", "sum.dim_IntList", "tan", "triplet_margin_loss"};

at::Tensor cast(const at::Tensor& tensor, at::ScalarType dtype) {
  const bool is_eligible = tensor.defined() && tensor.device().type() == kType && tensor.is_floating_point() &&
      tensor.scalar_type() != at::kDouble;
  return is_eligible ? at::autocast::cached_cast(dtype, tensor, kType) : tensor;
}

void cast_operands(const c10::OperatorHandle& op, torch::jit::Stack* stack, at::ScalarType dtype) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  const auto count = op.schema().arguments().size();
  for (auto* value = stack->data() + stack->size() - count; value != stack->data() + stack->size(); ++value) {
    if (value->isTensor()) {
      *value = c10::IValue(cast(value->toTensor(), dtype));
    } else if (value->isTensorList()) {
      c10::List<at::Tensor> list;
      for (const auto& tensor : value->toTensorVector()) list.push_back(cast(tensor, dtype));
      *value = c10::IValue(std::move(list));
    }
  }
  op.callBoxed(stack);
}

void lower_precision(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  cast_operands(op, stack, at::autocast::get_autocast_dtype(kType));
}

void float32(const c10::OperatorHandle& op, torch::jit::Stack* stack) { cast_operands(op, stack, at::kFloat); }

}  // namespace

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const auto* name : kLowerPrecision) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&lower_precision>());
  for (const auto* name : kFloat32) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&float32>());
}
