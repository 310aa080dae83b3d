// Empty tensors: whichever axis has no elements, and whatever the strides say, calls succeed and touch nothing.
#include "check.h"

// Stands around every output; nothing may change it.
enum { WIDTH = 8, GUARD = 64 };
static float guard[GUARD], values[GUARD];

static nvb_tensor make(void* data, const int64_t* shape, const int64_t* strides) {
  nvb_tensor tensor = nvb_tensor_make(data, NVB_DTYPE_F32, 3, shape[0], shape[1], shape[2], 0);
  if (strides != NULL) memcpy(tensor.strides, strides, 3 * sizeof *strides);
  return tensor;
}

static void check_operations(fixture* f, const nvb_weight* weight, float* matrix, float* from, float* to,
                             const int64_t* shape, const int64_t* strides) {
  nvb_tensor input = make(from, shape, strides), output = make(to, shape, strides);
  nvb_rms_norm_args norm;
  nvb_rms_norm_args_init(&norm);
  norm.input = norm.residual = input;
  norm.output = norm.residual_output = output;
  CHECK_OK(nvb_rms_norm(f->backend, &norm, f->stream));
  nvb_layer_norm_args layer_norm;
  nvb_layer_norm_args_init(&layer_norm);
  layer_norm.input = input;
  layer_norm.output = output;
  CHECK_OK(nvb_layer_norm(f->backend, &layer_norm, f->stream));
  nvb_linear_args linear;
  nvb_linear_args_init(&linear);
  linear.input = linear.residual = input;
  linear.output = output;
  linear.weight = weight;
  CHECK_OK(nvb_linear(f->backend, &linear, f->stream));
  nvb_gated_activation_args gated;
  nvb_gated_activation_args_init(&gated);
  gated.gate = gated.up = input;
  gated.output = output;
  CHECK_OK(nvb_gated_activation(f->backend, &gated, f->stream));
  nvb_softmax_args softmax;
  nvb_softmax_args_init(&softmax);
  softmax.input = input;
  softmax.output = output;
  CHECK_OK(nvb_softmax(f->backend, &softmax, f->stream));
  nvb_elementwise_args pair;
  nvb_elementwise_args_init(&pair);
  pair.input = pair.second = input;
  pair.output = output;
  CHECK_OK(nvb_add(f->backend, &pair, f->stream));
  memset(&pair.second, 0, sizeof pair.second);
  pair.factor = 2;
  CHECK_OK(nvb_soft_cap(f->backend, &pair, f->stream));
  CHECK_OK(nvb_convert(f->backend, &pair, f->stream));
  nvb_matmul_args product;
  nvb_matmul_args_init(&product);
  // One matrix for the whole batch, which has elements.
  const int64_t one[3] = {1, WIDTH, WIDTH};
  product.a = input;
  product.b = make(matrix, one, NULL);
  product.output = output;
  CHECK_OK(nvb_matmul(f->backend, &product, f->stream));
}

int main(void) {
  fixture f = open_fixture();
  for (int i = 0; i < GUARD; ++i) guard[i] = 0.5f;
  float* from = upload(&f, guard, sizeof guard);
  float* to = upload(&f, guard, sizeof guard);
  static float square[WIDTH * WIDTH];
  nvb_tensor part = nvb_tensor_2d(square, NVB_DTYPE_F32, WIDTH, WIDTH);
  nvb_weight_desc desc;
  nvb_weight_desc_init(&desc);
  desc.parts = &part;
  desc.part_count = 1;
  nvb_weight* weight = NULL;
  CHECK_OK(nvb_weight_create(f.backend, &desc, f.stream, &weight));

  const int64_t shapes[3][3] = {{0, 2, WIDTH}, {2, 0, WIDTH}, {0, 0, WIDTH}};
  for (int i = 0; i < 3; ++i) {
    const int64_t* shape = shapes[i];
    // Libraries write row-major strides in one of these ways: with the extents, or with 1 for those of 0.
    const int64_t products[3] = {shape[1] * WIDTH, WIDTH, 1};
    const int64_t of_ones[3] = {(shape[1] > 0 ? shape[1] : 1) * WIDTH, WIDTH, 1};
    const int64_t odd[3] = {3, 50, 2};
    const int64_t* const strides[] = {NULL, products, of_ones, odd};
    for (int j = 0; j < 4; ++j) {
      check_operations(&f, weight, from, from, to, shape, strides[j]);
      check_operations(&f, weight, from, NULL, NULL, shape, strides[j]);
    }
  }
  download(&f, values, to, sizeof values);
  CHECK(memcmp(values, guard, sizeof guard) == 0);

  // Elements keep their rules: the leading axes of this one fold into no stride.
  nvb_softmax_args softmax;
  nvb_softmax_args_init(&softmax);
  const int64_t shape[3] = {2, 2, 4}, apart[3] = {32, 4, 1};
  softmax.input = make(from, shape, apart);
  softmax.output = make(to, shape, NULL);
  CHECK_FAILS(nvb_softmax(f.backend, &softmax, f.stream), NVB_ERROR_INVALID_ARGUMENT, "input", "fold");

  CHECK_OK(nvb_weight_destroy(weight));
  release(&f, from);
  release(&f, to);
  close_fixture(&f);
  return test_result();
}
