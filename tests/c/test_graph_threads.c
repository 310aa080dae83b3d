// Graphs of two threads, a node that fails, and what graphs leave behind.
#include <pthread.h>

#include "graph_layer.h"

// A node that fails leaves the backend, the graph and the stream usable.
static void test_failing_node(fixture* f) {
  if (!test_on_cpu()) return;  // A GPU gives rows of zeros for a token outside the table.
  nvb_weight* table = weight(f, 8, WIDTH, 1);
  int32_t tokens[SEQUENCES] = {1, 8};
  int32_t* ids = upload(f, tokens, sizeof tokens);
  float* data = ones(f);
  nvb_embedding_args args;
  nvb_embedding_args_init(&args);
  args.tokens = numbers(ids);
  args.table = table;
  args.output = rows(data, WIDTH);
  nvb_graph* graph = NULL;
  CHECK_OK(nvb_graph_create(f->backend, &graph));
  CHECK_OK(nvb_graph_begin(graph, f->stream));
  CHECK_OK(add(f, data, f->stream));
  CHECK_OK(nvb_embedding(f->backend, &args, f->stream));
  CHECK_OK(nvb_graph_end(graph, f->stream));
  CHECK_FAILS(nvb_graph_launch(graph, f->stream), NVB_ERROR_INVALID_ARGUMENT, "node 1, embedding", "8");
  tokens[1] = 7;
  CHECK_OK(nvb_memory_copy(f->memory, ids, tokens, sizeof tokens, NVB_COPY_HOST_TO_DEVICE, f->stream));
  CHECK_OK(nvb_graph_launch(graph, f->stream));
  CHECK_OK(nvb_stream_synchronize(f->stream));
  CHECK_OK(nvb_graph_destroy(graph));
  CHECK_OK(nvb_weight_destroy(table));
  release(f, ids);
  release(f, data);
}

typedef struct thread_of_graph {
  fixture f;
  int number;
} thread_of_graph;

static void* run_thread(void* argument) {
  thread_of_graph* thread = argument;
  fixture* f = &thread->f;
  check_thread = thread->number;
  float* data = ones(f);
  for (int round = 0; round < 20; ++round) {
    nvb_graph* graph = NULL;
    CHECK_OK(nvb_memory_fill(f->memory, data, 0, BYTES, f->stream));
    CHECK_OK(nvb_graph_create(f->backend, &graph));
    CHECK_OK(nvb_graph_begin(graph, f->stream));
    CHECK_OK(nvb_memory_fill(f->memory, data, (uint32_t)thread->number, BYTES, f->stream));
    CHECK_OK(nvb_graph_end(graph, f->stream));
    for (int i = 0; i < 5; ++i) CHECK_OK(nvb_graph_launch(graph, f->stream));
    CHECK_OK(nvb_graph_destroy(graph));
    unsigned char values[BYTES];
    download(f, values, data, sizeof values);
    for (int i = 0; i < BYTES; ++i) CHECK_EQUAL(values[i], thread->number);
  }
  release(f, data);
  return NULL;
}

// Two threads record and launch graphs of their own on streams of one backend.
static void test_threads(fixture* f) {
  thread_of_graph threads[2];
  pthread_t running[2];
  for (int i = 0; i < 2; ++i) {
    threads[i] = (thread_of_graph){.f = *f, .number = i + 1};
    CHECK_OK(nvb_stream_create(f->backend, 0, &threads[i].f.stream));
    CHECK(pthread_create(&running[i], NULL, run_thread, &threads[i]) == 0);
  }
  for (int i = 0; i < 2; ++i) {
    pthread_join(running[i], NULL);
    CHECK_OK(nvb_stream_destroy(threads[i].f.stream));
  }
}

// Graphs that come and go, and launches, leave nothing behind.
static void test_growth(fixture* f) {
  float* data = ones(f);
  long before = 0;
  for (int round = 0; round < 2000; ++round) {
    if (round == 200) before = resident_kilobytes();
    nvb_graph* graph = NULL;
    CHECK_OK(nvb_graph_create(f->backend, &graph));
    CHECK_OK(nvb_graph_begin(graph, f->stream));
    CHECK_OK(add(f, data, f->stream));
    if (round % 2 == 0) CHECK_OK(nvb_graph_end(graph, f->stream));
    if (round % 4 == 0) CHECK_OK(nvb_graph_launch(graph, f->stream));
    CHECK_OK(nvb_graph_destroy(graph));
  }
  CHECK_GROWTH(before);
  release(f, data);
}

int main(void) {
  fixture f = open_fixture();
  test_failing_node(&f);
  test_threads(&f);
  test_growth(&f);
  close_fixture(&f);
  return test_result();
}
