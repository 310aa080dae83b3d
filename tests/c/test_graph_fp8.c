// A layer whose products a graph converts to FP8: bounds, marks, statistics, and what stays as it was.
#include "graph_layer.h"

enum { PRODUCTS = 7 };

// On a device without FP8 arithmetic weights are kept in FP8 all the same.
static nvb_graph_fp8_options fp8_options(fixture* f) {
  nvb_graph_fp8_options options;
  nvb_graph_fp8_options_init(&options);
  options.storage_only = 1;
  options.measure_errors = 1;
  options.stream = f->stream;
  return options;
}

static nvb_graph_fp8_info fp8_info(nvb_graph* graph) {
  nvb_graph_fp8_info info;
  nvb_graph_fp8_info_init(&info);
  CHECK_OK(nvb_graph_get_fp8_info(graph, &info));
  return info;
}

static nvb_graph_fp8_product fp8_product(nvb_graph* graph, uint32_t index) {
  nvb_graph_fp8_product product;
  nvb_graph_fp8_product_init(&product);
  CHECK_OK(nvb_graph_get_fp8_product(graph, index, &product));
  return product;
}

static uint64_t bytes_in_use(fixture* f) {
  nvb_memory_statistics statistics;
  nvb_memory_statistics_init(&statistics);
  CHECK_OK(nvb_memory_get_statistics(f->memory, &statistics));
  return statistics.allocated;
}

static nvb_status get_info(void* info, void* graph) {
  return nvb_graph_get_fp8_info(graph, info);
}

static nvb_status get_product(void* product, void* graph) {
  return nvb_graph_get_fp8_product(graph, 0, product);
}

static double distance(const float* one, const float* other) {
  double squares = 0, reference = 0;
  for (int i = 0; i < SEQUENCES * WIDTH; ++i) {
    squares += ((double)one[i] - other[i]) * ((double)one[i] - other[i]);
    reference += (double)other[i] * other[i];
  }
  return sqrt(squares / reference);
}

// What a launch leaves in the residual stream, which is as before afterwards.
static void launched(fixture* f, const layer* l, nvb_graph* graph, const float* x, float* result) {
  CHECK_OK(nvb_memory_copy(f->memory, l->x, x, BYTES, NVB_COPY_HOST_TO_DEVICE, f->stream));
  CHECK_OK(nvb_graph_launch(graph, f->stream));
  download(f, result, l->x, BYTES);
  CHECK_OK(nvb_memory_copy(f->memory, l->x, x, BYTES, NVB_COPY_HOST_TO_DEVICE, f->stream));
  CHECK_OK(nvb_stream_synchronize(f->stream));
}

static void test_arguments(fixture* f, const layer* l) {
  nvb_graph_fp8_options options = fp8_options(f);
  nvb_graph_fp8_info info;
  nvb_graph_fp8_info_init(&info);
  CHECK_INVALID(nvb_graph_convert_fp8(NULL, &options));
  nvb_graph* empty = NULL;
  CHECK_OK(nvb_graph_create(f->backend, &empty));
  CHECK_FAILS(nvb_graph_convert_fp8(empty, &options), NVB_ERROR_INVALID_ARGUMENT, "holds nothing");
  CHECK_FAILS(nvb_graph_set_fp8_mark(empty, 0, NVB_FP8_MARK_KEEP), NVB_ERROR_INVALID_ARGUMENT, "holds nothing");
  CHECK_OK(nvb_graph_destroy(empty));

  nvb_graph* graph = record(f, l, f->stream);
  CHECK_FAILS(nvb_graph_get_fp8_info(graph, &info), NVB_ERROR_INVALID_ARGUMENT, "not converted");
  options.maximum_error = -1;
  CHECK_INVALID(nvb_graph_convert_fp8(graph, &options));
  options.maximum_error = NAN;
  CHECK_INVALID(nvb_graph_convert_fp8(graph, &options));
  options = fp8_options(f);
  options.launches = 1 << 17;
  CHECK_INVALID(nvb_graph_convert_fp8(graph, &options));
  options = fp8_options(f);
  options.weights_alone = 2;
  CHECK_FAILS(nvb_graph_convert_fp8(graph, &options), NVB_ERROR_CONFIGURATION, "weights_alone is 2");
  // Node 0 is a norm.
  CHECK_FAILS(nvb_graph_set_fp8_mark(graph, 0, NVB_FP8_MARK_KEEP), NVB_ERROR_INVALID_ARGUMENT, "rms_norm");
  CHECK_FAILS(nvb_graph_set_fp8_mark(graph, NODES, NVB_FP8_MARK_KEEP), NVB_ERROR_INVALID_ARGUMENT, "13 nodes");
  CHECK_FAILS(nvb_graph_set_fp8_mark(graph, 1, 3), NVB_ERROR_INVALID_ARGUMENT, "mark is 3");
  if (test_on_cpu()) {
    CHECK_FAILS(nvb_graph_convert_fp8(graph, NULL), NVB_ERROR_FP8, "no FP8 arithmetic");
    CHECK_INVALID(nvb_graph_get_fp8_info(graph, &info));
  }
  options = fp8_options(f);
  CHECK_OK(nvb_graph_convert_fp8(graph, &options));
  CHECK_STRUCT(info, get_info, graph);
  nvb_graph_fp8_product product = fp8_product(graph, PRODUCTS - 1);
  CHECK_STRUCT(product, get_product, graph);
  CHECK_INVALID(nvb_graph_get_fp8_product(graph, PRODUCTS, &product));
  CHECK_OK(nvb_graph_destroy(graph));
}

// All products are converted, which a second graph has for nothing, and the error is as told.
static void test_all(fixture* f, const layer* l, const float* x, const float* exact) {
  float result[SEQUENCES * WIDTH];
  nvb_graph* graph = record(f, l, f->stream);
  const double bytes = info_of(graph).bytes;
  nvb_graph_fp8_options options = fp8_options(f);
  options.measure_times = 1;
  options.launches = 2;
  CHECK_OK(nvb_graph_convert_fp8(graph, &options));
  const nvb_graph_fp8_info info = fp8_info(graph);
  CHECK_EQUAL(info.products, PRODUCTS);
  CHECK_EQUAL(info.converted, PRODUCTS);
  CHECK(info.operations == info.converted_operations && info.operations > 0);
  CHECK(info.weight_bytes_after < info.weight_bytes_before * 3 / 10);
  CHECK(info.error > 0 && info.error < 0.1 && info.seconds_before > 0 && info.seconds_after > 0);
  CHECK(info_of(graph).bytes < bytes);
  launched(f, l, graph, x, result);
  const double error = distance(result, exact);
  CHECK(error > 0 && error <= info.error * 1.01);
  for (uint32_t i = 0; i < PRODUCTS; ++i) {
    const nvb_graph_fp8_product product = fp8_product(graph, i);
    CHECK(product.converted == 1 && product.error == -1 && product.weight_error > 0 && product.weight_error < 0.05);
    CHECK(product.input_rows == SEQUENCES && product.reason[0] != '\0' && product.mark == NVB_FP8_MARK_AUTO);
  }

  const uint64_t used = bytes_in_use(f);
  nvb_graph* second = record(f, l, f->stream);
  CHECK_OK(nvb_graph_convert_fp8(second, &options));
  CHECK_EQUAL(bytes_in_use(f), used);
  float again[SEQUENCES * WIDTH];
  launched(f, l, second, x, again);
  CHECK(memcmp(result, again, sizeof again) == 0);

  // Passes begin with the converted list; memory that is replaced and a level that is none keep it.
  CHECK_OK(nvb_graph_optimize(second, NVB_OPTIMIZE_O2, NULL));
  launched(f, l, second, x, again);
  CHECK(distance(again, result) < 1e-3 && distance(again, exact) > 0);
  CHECK_OK(nvb_graph_optimize(second, NVB_OPTIMIZE_O0, NULL));
  launched(f, l, second, x, again);
  CHECK(memcmp(result, again, sizeof again) == 0);
  float* elsewhere = upload(f, x, BYTES);
  CHECK_OK(nvb_graph_rebind(second, l->copied, BYTES, elsewhere));
  launched(f, l, second, x, again);
  CHECK(memcmp(result, again, sizeof again) == 0);
  CHECK_OK(nvb_graph_destroy(second));
  release(f, elsewhere);
  CHECK_EQUAL(bytes_in_use(f), used);
  CHECK_OK(nvb_graph_destroy(graph));
}

// Products beyond the bound stay, marks go before it, and each conversion begins with what was recorded.
static void test_bound(fixture* f, const layer* l, const float* x, const float* exact) {
  float result[SEQUENCES * WIDTH];
  nvb_graph* graph = record(f, l, f->stream);
  nvb_graph_fp8_options options = fp8_options(f);
  CHECK_OK(nvb_graph_convert_fp8(graph, &options));
  const double all = fp8_info(graph).error;
  options.maximum_error = all * 0.9;
  CHECK_OK(nvb_graph_convert_fp8(graph, &options));
  const nvb_graph_fp8_info some = fp8_info(graph);
  CHECK(some.converted > 0 && some.converted < PRODUCTS && some.error <= options.maximum_error);
  CHECK(some.converted_operations < some.operations);
  double largest = 0, least = INFINITY;
  for (uint32_t i = 0; i < PRODUCTS; ++i) {
    const nvb_graph_fp8_product product = fp8_product(graph, i);
    CHECK(product.error > 0);
    if (product.converted) {
      largest = fmax(largest, product.error);
    } else {
      least = fmin(least, product.error);
      CHECK(strstr(product.reason, "the bound") != NULL);
    }
  }
  CHECK(largest <= least);
  options.maximum_error = 1e-12;
  CHECK_OK(nvb_graph_convert_fp8(graph, &options));
  CHECK_EQUAL(fp8_info(graph).converted, 0);
  CHECK(fp8_info(graph).error == 0);
  launched(f, l, graph, x, result);
  CHECK(memcmp(result, exact, sizeof result) == 0);

  // The product of the query is node 1, the last one the tenth.
  CHECK_OK(nvb_graph_set_fp8_mark(graph, 1, NVB_FP8_MARK_CONVERT));
  CHECK_OK(nvb_graph_convert_fp8(graph, &options));
  CHECK_EQUAL(fp8_info(graph).converted, 1);
  CHECK(fp8_info(graph).error > options.maximum_error);
  CHECK(fp8_product(graph, 0).converted && strstr(fp8_product(graph, 0).reason, "marked") != NULL);
  CHECK_OK(nvb_graph_set_fp8_mark(graph, 1, NVB_FP8_MARK_KEEP));
  options.maximum_error = 0;
  CHECK_OK(nvb_graph_convert_fp8(graph, &options));
  CHECK_EQUAL(fp8_info(graph).converted, PRODUCTS - 1);
  CHECK_EQUAL(fp8_product(graph, 0).mark, NVB_FP8_MARK_KEEP);
  CHECK(!fp8_product(graph, 0).converted && strstr(fp8_product(graph, 0).reason, "kept") != NULL);
  CHECK_OK(nvb_graph_destroy(graph));
}

// A value that is no number is named, and the graph is as before.
static void test_what_cannot_be_converted(fixture* f, const float* x) {
  float values[WIDTH * WIDTH] = {0};
  values[3 * WIDTH + 5] = INFINITY;
  nvb_tensor part = nvb_tensor_2d(values, NVB_DTYPE_F32, WIDTH, WIDTH);
  nvb_weight_desc desc;
  nvb_weight_desc_init(&desc);
  desc.parts = &part;
  desc.part_count = 1;
  nvb_weight* weight = NULL;
  CHECK_OK(nvb_weight_create(f->backend, &desc, f->stream, &weight));
  float* input = upload(f, x, BYTES);
  float* output = ones(f);
  nvb_graph* graph = NULL;
  CHECK_OK(nvb_graph_create(f->backend, &graph));
  CHECK_OK(nvb_graph_begin(graph, f->stream));
  product(f, weight, rows(input, WIDTH), rows(output, WIDTH), NULL, f->stream);
  CHECK_OK(nvb_graph_end(graph, f->stream));
  nvb_graph_fp8_options options = fp8_options(f);
  CHECK_FAILS(nvb_graph_convert_fp8(graph, &options), NVB_ERROR_INVALID_ARGUMENT, "node 0");
  nvb_graph_fp8_info info;
  nvb_graph_fp8_info_init(&info);
  CHECK_INVALID(nvb_graph_get_fp8_info(graph, &info));
  CHECK_OK(nvb_graph_launch(graph, f->stream));
  CHECK_OK(nvb_graph_destroy(graph));

  // Weights in 8 bits stay as they are.
  values[3 * WIDTH + 5] = 1;
  desc.format = NVB_WEIGHT_FORMAT_INT8;
  CHECK_OK(nvb_weight_destroy(weight));
  CHECK_OK(nvb_weight_create(f->backend, &desc, f->stream, &weight));
  CHECK_OK(nvb_graph_create(f->backend, &graph));
  CHECK_OK(nvb_graph_begin(graph, f->stream));
  product(f, weight, rows(input, WIDTH), rows(output, WIDTH), NULL, f->stream);
  CHECK_OK(nvb_graph_end(graph, f->stream));
  CHECK_OK(nvb_graph_convert_fp8(graph, &options));
  CHECK_EQUAL(fp8_info(graph).converted, 0);
  CHECK(strstr(fp8_product(graph, 0).reason, "int8") != NULL);
  CHECK_OK(nvb_graph_destroy(graph));
  CHECK_OK(nvb_weight_destroy(weight));
  release(f, input);
  release(f, output);
}

int main(void) {
  fixture f = open_fixture();
  layer l = create_layer(&f);
  float x[SEQUENCES * WIDTH], exact[SEQUENCES * WIDTH];
  download(&f, x, l.x, BYTES);
  nvb_graph* graph = record(&f, &l, f.stream);
  launched(&f, &l, graph, x, exact);
  CHECK_OK(nvb_graph_destroy(graph));
  test_arguments(&f, &l);
  const uint64_t used = bytes_in_use(&f);
  test_all(&f, &l, x, exact);
  test_bound(&f, &l, x, exact);
  test_what_cannot_be_converted(&f, x);
  CHECK_EQUAL(bytes_in_use(&f), used);
  // A graph keeps the copies of weights that are gone.
  graph = record(&f, &l, f.stream);
  nvb_graph_fp8_options options = fp8_options(&f);
  CHECK_OK(nvb_graph_convert_fp8(graph, &options));
  destroy_handles(&l);
  float result[SEQUENCES * WIDTH];
  launched(&f, &l, graph, x, result);
  CHECK(distance(result, exact) < 0.1);
  CHECK_OK(nvb_graph_destroy(graph));
  destroy_memory(&f, &l);
  close_fixture(&f);
  return test_result();
}
