// Operations that torch calls on accelerators only, for the CPU: convolutions of other backends, and the fused cells of
// LSTM and GRU.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

namespace {

using at::IntArrayRef;
using at::Tensor;
using Optional = std::optional<Tensor>;

bool is_there(const Optional& tensor) { return tensor.has_value() && tensor->defined(); }

// -- convolutions ------------------------------------------------------------------------------------------------------

Tensor convolution(const Tensor& input, const Tensor& weight, const Optional& bias, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
                   int64_t groups) {
  return at::convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups);
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& input, const Tensor& weight, IntArrayRef stride, IntArrayRef padding,
    IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  const std::vector<int64_t> bias_sizes{transposed ? weight.size(1) * groups : weight.size(0)};
  return at::convolution_backward(gradient, input, weight, bias_sizes, stride, padding, dilation, transposed,
                                  output_padding, groups, mask);
}

// -- cells -------------------------------------------------------------------------------------------------------------

Tensor plus(const Tensor& gates, const Optional& bias) { return is_there(bias) ? gates + *bias : gates; }

// The workspace has the gates behind their activations.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& from_input, const Tensor& from_hidden, const Tensor& cx,
                                             const Optional& input_bias, const Optional& hidden_bias) {
  const auto gates = (plus(from_input, input_bias) + plus(from_hidden, hidden_bias)).chunk(4, 1);
  const auto in = at::sigmoid(gates[0]), forget = at::sigmoid(gates[1]), cell = at::tanh(gates[2]),
             out = at::sigmoid(gates[3]);
  const auto cy = forget * cx + in * cell;
  return {out * at::tanh(cy), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const Optional& grad_hy, const Optional& grad_cy,
                                                      const Tensor& cx, const Tensor& cy, const Tensor& workspace,
                                                      bool has_bias) {
  if (!is_there(grad_hy) && !is_there(grad_cy)) return {};
  const auto gates = workspace.chunk(4, 1);
  const auto &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
  const auto of_hy = is_there(grad_hy) ? *grad_hy : at::zeros_like(cx);
  const auto squashed = at::tanh(cy);
  auto of_cy = of_hy * out * (1 - squashed * squashed);
  if (is_there(grad_cy)) of_cy = of_cy + *grad_cy;
  const auto of_gates = at::cat({of_cy * cell * in * (1 - in), of_cy * cx * forget * (1 - forget),
                                 of_cy * in * (1 - cell * cell), of_hy * squashed * out * (1 - out)}, 1);
  return {of_gates, of_cy * forget, has_bias ? of_gates.sum(0) : Tensor()};
}

// The workspace has the gates behind their activations, the hidden state, and what the reset gate is multiplied with.
std::tuple<Tensor, Tensor> gru_cell(const Tensor& from_input, const Tensor& from_hidden, const Tensor& hx,
                                    const Optional& input_bias, const Optional& hidden_bias) {
  const auto of_input = plus(from_input, input_bias).chunk(3, 1), of_hidden = plus(from_hidden, hidden_bias).chunk(3, 1);
  const auto reset = at::sigmoid(of_input[0] + of_hidden[0]), update = at::sigmoid(of_input[1] + of_hidden[1]);
  const auto fresh = at::tanh(of_input[2] + reset * of_hidden[2]);
  return {fresh + update * (hx - fresh), at::cat({reset, update, fresh, hx, of_hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy, const Tensor& workspace,
                                                                     bool has_bias) {
  const auto saved = workspace.chunk(5, 1);
  const auto &reset = saved[0], &update = saved[1], &fresh = saved[2], &hx = saved[3], &hidden = saved[4];
  const auto of_update = grad_hy * (hx - fresh) * update * (1 - update);
  const auto of_fresh = grad_hy * (1 - update) * (1 - fresh * fresh);
  const auto of_reset = of_fresh * hidden * reset * (1 - reset);
  const auto of_input = at::cat({of_reset, of_update, of_fresh}, 1);
  const auto of_hidden = at::cat({of_reset, of_update, of_fresh * reset}, 1);
  return {of_input, of_hidden, grad_hy * update, has_bias ? of_input.sum(0) : Tensor(),
          has_bias ? of_hidden.sum(0) : Tensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
}
