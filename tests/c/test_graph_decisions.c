// Decisions of optimisations and conversions: saved, and loaded for the same list on other memory.
#include "graph_layer.h"

static void expect_same_report(nvb_graph* one, nvb_graph* other, const char* words) {
  char* expected = text_of(one, NVB_GRAPH_FORMAT_JSON, nvb_graph_get_report);
  char* found = text_of(other, NVB_GRAPH_FORMAT_JSON, nvb_graph_get_report);
  // Rewrites and measured times are the first one's; a note says where they come from.
  CHECK(strstr(found, words) != NULL && strstr(expected, words) != NULL);
  CHECK(strstr(found, "were not measured again") != NULL && strstr(expected, "were not measured again") == NULL);
  const char* times = strstr(expected, "\"measured_times\"");
  CHECK(times != NULL && strstr(found, times) != NULL);
  free(expected);
  free(found);
}

// What a launch leaves in x.
static void launched(fixture* f, const layer* l, nvb_graph* graph, const float* initial, float* values) {
  CHECK_OK(nvb_memory_copy(f->memory, l->x, initial, BYTES, NVB_COPY_HOST_TO_DEVICE, f->stream));
  set_position(f, l, 0, f->stream);
  CHECK_OK(nvb_graph_launch(graph, f->stream));
  download(f, values, l->x, BYTES);
}

static void test_decisions(fixture* f, const char* path) {
  layer first = create_layer(f), second = create_layer(f);
  nvb_graph *one = record(f, &first, f->stream), *other = record(f, &second, f->stream);
  float initial[SEQUENCES * WIDTH], expected[SEQUENCES * WIDTH], found[SEQUENCES * WIDTH];
  download(f, initial, first.x, BYTES);
  CHECK_FAILS(nvb_graph_write_decisions(one, path, NULL), NVB_ERROR_INVALID_ARGUMENT, "neither optimised");
  nvb_graph_optimize_options options;
  nvb_graph_optimize_options_init(&options);
  options.measure_times = options.measure_errors = 1;
  options.launches = 3;
  options.disabled_passes = "linear_residual";
  CHECK_OK(nvb_graph_optimize(one, NVB_OPTIMIZE_O2, &options));
  nvb_graph_fp8_options fp8;
  nvb_graph_fp8_options_init(&fp8);
  fp8.storage_only = 1;
  fp8.measure_errors = 1;
  fp8.stream = f->stream;
  CHECK_OK(nvb_graph_set_fp8_mark(one, 1, NVB_FP8_MARK_KEEP));
  CHECK_OK(nvb_graph_convert_fp8(one, &fp8));
  // The conversion has run the passes again; their measurement is made once more.
  CHECK_OK(nvb_graph_optimize(one, NVB_OPTIMIZE_O2, &options));
  CHECK_OK(nvb_graph_write_decisions(one, path, "weights 1"));

  CHECK_FAILS(nvb_graph_read_decisions(other, path, "weights 2", f->stream), NVB_ERROR_INVALID_ARGUMENT, "weights 1");
  CHECK_OK(nvb_graph_read_decisions(other, path, "weights 1", f->stream));
  CHECK_EQUAL(info_of(other).nodes, info_of(one).nodes);
  expect_same_report(one, other, "\"level\":2");
  nvb_graph_fp8_info infos[2];
  for (int i = 0; i < 2; ++i) {
    nvb_graph_fp8_info_init(&infos[i]);
    CHECK_OK(nvb_graph_get_fp8_info(i == 0 ? one : other, &infos[i]));
  }
  CHECK_EQUAL(infos[0].converted, 6);
  CHECK(memcmp(&infos[0], &infos[1], sizeof infos[0]) == 0);
  for (uint32_t i = 0; i < infos[0].products; ++i) {
    nvb_graph_fp8_product products[2];
    for (int j = 0; j < 2; ++j) {
      nvb_graph_fp8_product_init(&products[j]);
      CHECK_OK(nvb_graph_get_fp8_product(j == 0 ? one : other, i, &products[j]));
    }
    CHECK_EQUAL(products[0].mark, products[1].mark);
    CHECK_EQUAL(products[0].converted, products[1].converted);
    CHECK_EQUAL(products[0].weight_error, products[1].weight_error);
  }
  launched(f, &first, one, initial, expected);
  launched(f, &second, other, initial, found);
  CHECK(memcmp(expected, found, sizeof found) == 0);

  // Saved again by whoever loaded, they are the same decisions.
  CHECK_OK(nvb_graph_write_decisions(other, path, "weights 1"));
  CHECK_OK(nvb_graph_read_decisions(one, path, "weights 1", f->stream));
  launched(f, &first, one, initial, found);
  CHECK(memcmp(expected, found, sizeof found) == 0);

  // Another list.
  nvb_tensor mark = rows(second.y, WIDTH);
  CHECK_OK(nvb_graph_mark_internal(other, &mark));
  CHECK_FAILS(nvb_graph_read_decisions(other, path, "weights 1", f->stream), NVB_ERROR_INVALID_ARGUMENT,
              "another list");
  launched(f, &second, other, initial, found);
  CHECK(memcmp(expected, found, sizeof found) == 0);
  CHECK_OK(nvb_graph_destroy(one));
  CHECK_OK(nvb_graph_destroy(other));
  destroy_handles(&first);
  destroy_handles(&second);
  destroy_memory(f, &first);
  destroy_memory(f, &second);
}

static void write_bytes(const char* path, const char* bytes, size_t count) {
  FILE* out = fopen(path, "wb");
  if (out == NULL) abort();
  CHECK_EQUAL(fwrite(bytes, 1, count, out), count);
  CHECK_EQUAL(fclose(out), 0);
}

// Files that are damaged, somebody else's, or none, and handles that are.
static void test_refused(fixture* f, const char* path, const char* folder) {
  layer l = create_layer(f);
  nvb_graph *graph = record(f, &l, f->stream), *empty = NULL;
  CHECK_OK(nvb_graph_create(f->backend, &empty));
  CHECK_OK(nvb_graph_optimize(graph, NVB_OPTIMIZE_O1, NULL));
  CHECK_OK(nvb_graph_write_decisions(graph, path, NULL));
  CHECK_OK(nvb_graph_read_decisions(graph, path, "", NULL));
  const uint32_t nodes = info_of(graph).nodes;
#define REFUSED(word) CHECK_FAILS(nvb_graph_read_decisions(graph, path, NULL, NULL), NVB_ERROR_IO, word)
  static char bytes[1 << 16];
  FILE* in = fopen(path, "rb");
  if (in == NULL) abort();
  const size_t count = fread(bytes, 1, sizeof bytes, in);
  fclose(in);
  write_bytes(path, bytes, count / 2);
  REFUSED("damaged");
  bytes[count / 2] ^= 1;
  write_bytes(path, bytes, count);
  REFUSED("damaged");
  // A damaged file of this kind is replaced.
  CHECK_OK(nvb_graph_write_decisions(graph, path, NULL));
  write_bytes(path, "a letter", 8);
  REFUSED("no file of a graph's decisions");
  CHECK_FAILS(nvb_graph_write_decisions(graph, path, NULL), NVB_ERROR_IO, "something else");
  CHECK_FAILS(nvb_graph_write_decisions(graph, folder, NULL), NVB_ERROR_IO, "a folder");
  CHECK_FAILS(nvb_graph_read_decisions(graph, folder, NULL, NULL), NVB_ERROR_IO, "a folder");
  CHECK_FAILS(nvb_graph_read_decisions(graph, "/dev/zero", NULL, NULL), NVB_ERROR_IO, "a device");
  CHECK_EQUAL(remove(path), 0);
  REFUSED(path);
  CHECK_INVALID(nvb_graph_write_decisions(graph, NULL, NULL));
  CHECK_INVALID(nvb_graph_read_decisions(graph, "", NULL, NULL));
  static char key[5000];
  memset(key, 'k', sizeof key - 1);
  CHECK_FAILS(nvb_graph_write_decisions(graph, path, key), NVB_ERROR_INVALID_ARGUMENT, "4999 bytes");
  CHECK_FAILS(nvb_graph_write_decisions(empty, path, NULL), NVB_ERROR_INVALID_ARGUMENT, "holds nothing");
  CHECK_FAILS(nvb_graph_read_decisions(empty, path, NULL, NULL), NVB_ERROR_INVALID_ARGUMENT, "holds nothing");
  CHECK_INVALID(nvb_graph_write_decisions(NULL, path, NULL));
  CHECK_FAILS(nvb_graph_read_decisions(foreign_handle(), path, NULL, NULL), NVB_ERROR_INVALID_ARGUMENT, "not a graph");
  CHECK_EQUAL(info_of(graph).nodes, nodes);
  CHECK_OK(nvb_graph_launch(graph, f->stream));
  CHECK_OK(nvb_stream_synchronize(f->stream));
  CHECK_OK(nvb_graph_destroy(graph));
  CHECK_OK(nvb_graph_destroy(empty));
  destroy_handles(&l);
  destroy_memory(f, &l);
}

int main(void) {
  fixture f = open_fixture();
  char folder[] = "/tmp/nvb_graph_decisions_XXXXXX", path[64];
  if (mkdtemp(folder) == NULL) abort();
  snprintf(path, sizeof path, "%s/decisions.json", folder);
  test_decisions(&f, path);
  test_refused(&f, path, folder);
  close_fixture(&f);
  CHECK_EQUAL(rmdir(folder), 0);
  return test_result();
}
