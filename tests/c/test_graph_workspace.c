// Graphs that share one workspace: results, order, what is counted, and ends in any order.
#include <pthread.h>

#include "graph_layer.h"

static uint64_t allocated(fixture* f) {
  nvb_memory_statistics statistics;
  nvb_memory_statistics_init(&statistics);
  CHECK_OK(nvb_memory_get_statistics(f->memory, &statistics));
  return statistics.allocated;
}

static nvb_graph* of_add(fixture* f, float* data) {
  nvb_graph* graph = NULL;
  CHECK_OK(nvb_graph_create(f->backend, &graph));
  CHECK_OK(nvb_graph_begin(graph, f->stream));
  CHECK_OK(add(f, data, f->stream));
  CHECK_OK(nvb_graph_end(graph, f->stream));
  return graph;
}

// The three graphs give what they gave, with one block of workspace that the backend's statistics count.
static void test_sharing(fixture* f) {
  layer l = create_layer(f);
  nvb_graph* graphs[3];
  float* data = ones(f);
  for (int i = 0; i < 2; ++i) graphs[i] = record(f, &l, f->stream);
  graphs[2] = of_add(f, data);
  CHECK_EQUAL(info_of(graphs[0]).workspace_graphs, 1);
  CHECK_OK(nvb_graph_share_workspace(graphs[0], graphs[0]));
  CHECK_EQUAL(info_of(graphs[0]).workspace_graphs, 1);
  CHECK_OK(nvb_graph_share_workspace(graphs[2], graphs[1]));
  CHECK_OK(nvb_graph_share_workspace(graphs[0], graphs[2]));
  CHECK_OK(nvb_graph_share_workspace(graphs[1], graphs[0]));
  const uint64_t before = allocated(f);
  for (int i = 0; i < 3; ++i) {
    CHECK_EQUAL(info_of(graphs[i]).workspace_graphs, 3);
    CHECK_EQUAL(info_of(graphs[i]).workspace_bytes, 0);
  }
  // The least demanding one first: the block has room for all that share it.
  CHECK_OK(nvb_graph_launch(graphs[2], f->stream));
  check_value(f, data, 2);
  const uint64_t bytes = info_of(graphs[2]).workspace_bytes;
  CHECK(test_on_cpu() ? bytes == 0 : bytes > 0);
  CHECK(allocated(f) >= before + bytes && allocated(f) <= before + bytes + bytes / 4);
  const uint64_t after = allocated(f);
  float initial[SEQUENCES * WIDTH], expected[SEQUENCES * WIDTH], found[SEQUENCES * WIDTH];
  download(f, initial, l.x, BYTES);
  for (int i = 0; i < 2; ++i) {
    CHECK_OK(nvb_memory_copy(f->memory, l.x, initial, BYTES, NVB_COPY_HOST_TO_DEVICE, f->stream));
    set_position(f, &l, 0, f->stream);
    CHECK_OK(nvb_graph_launch(graphs[i], f->stream));
    CHECK_EQUAL(info_of(graphs[i]).workspace_bytes, bytes);
    download(f, i == 0 ? expected : found, l.x, BYTES);
  }
  CHECK(memcmp(expected, found, sizeof found) == 0 && memcmp(initial, found, sizeof found) != 0);
  CHECK_EQUAL(allocated(f), after);

  // One of its own again, which another block is for.
  CHECK_OK(nvb_graph_share_workspace(graphs[2], NULL));
  CHECK_OK(nvb_graph_share_workspace(graphs[2], NULL));
  CHECK_EQUAL(info_of(graphs[2]).workspace_graphs, 1);
  CHECK_EQUAL(info_of(graphs[1]).workspace_graphs, 2);
  CHECK_OK(nvb_graph_launch(graphs[2], f->stream));
  check_value(f, data, 4);
  CHECK(test_on_cpu() || allocated(f) > after);
  // The first goes, and the workspace stays.
  CHECK_OK(nvb_graph_destroy(graphs[0]));
  CHECK_EQUAL(info_of(graphs[1]).workspace_graphs, 1);
  CHECK_OK(nvb_memory_copy(f->memory, l.x, initial, BYTES, NVB_COPY_HOST_TO_DEVICE, f->stream));
  CHECK_OK(nvb_graph_launch(graphs[1], f->stream));
  download(f, found, l.x, BYTES);
  CHECK(memcmp(expected, found, sizeof found) == 0);
  CHECK_OK(nvb_graph_destroy(graphs[1]));
  CHECK_OK(nvb_graph_destroy(graphs[2]));
  CHECK_OK(nvb_backend_synchronize(f->backend));
  CHECK_EQUAL(allocated(f), before);
  destroy_handles(&l);
  destroy_memory(f, &l);
  release(f, data);
}

// A graph that needs more than the block has: it grows, and those that were launched before are prepared again.
static void test_growth(fixture* f) {
  float* data = ones(f);
  nvb_graph* small = of_add(f, data);
  CHECK_OK(nvb_graph_launch(small, f->stream));
  const uint64_t first = info_of(small).workspace_bytes;
  layer l = create_layer(f);
  nvb_graph* large = NULL;
  CHECK_OK(nvb_graph_create(f->backend, &large));
  CHECK_OK(nvb_graph_begin(large, f->stream));
  // While it is being recorded, so that nobody knows yet what it needs.
  CHECK_OK(nvb_graph_share_workspace(large, small));
  step(f, &l, f->stream);
  CHECK_OK(nvb_graph_end(large, f->stream));
  CHECK_OK(nvb_graph_launch(large, f->stream));
  CHECK(info_of(large).workspace_bytes >= first);
  for (int i = 0; i < 3; ++i) CHECK_OK(nvb_graph_launch(i % 2 == 0 ? small : large, f->stream));
  check_value(f, data, 8);
  CHECK_EQUAL(info_of(small).workspace_bytes, info_of(large).workspace_bytes);
  CHECK_OK(nvb_graph_destroy(small));
  CHECK_OK(nvb_graph_destroy(large));
  destroy_handles(&l);
  destroy_memory(f, &l);
  release(f, data);
}

typedef struct user {
  fixture f;
  nvb_graph* graph;
  int number;
} user;

enum { LAUNCHES = 50 };

static void* launch_often(void* argument) {
  user* u = argument;
  check_thread = u->number;
  for (int i = 0; i < LAUNCHES; ++i) CHECK_OK(nvb_graph_launch(u->graph, u->f.stream));
  CHECK_OK(nvb_stream_synchronize(u->f.stream));
  return NULL;
}

// Two graphs that add to the same memory, on two streams and from two threads: no sum is lost, since they take turns.
static void test_order(fixture* f) {
  float* data = upload(f, (float[SEQUENCES * WIDTH]){0}, BYTES);
  float* one = ones(f);
  user users[2];
  pthread_t threads[2];
  for (int i = 0; i < 2; ++i) {
    users[i] = (user){.f = *f, .number = i + 1};
    CHECK_OK(nvb_stream_create(f->backend, 0, &users[i].f.stream));
    CHECK_OK(nvb_graph_create(f->backend, &users[i].graph));
    CHECK_OK(nvb_graph_begin(users[i].graph, f->stream));
    nvb_elementwise_args args;
    nvb_elementwise_args_init(&args);
    args.input = args.output = rows(data, WIDTH);
    args.second = rows(one, WIDTH);
    CHECK_OK(nvb_add(f->backend, &args, f->stream));
    CHECK_OK(nvb_graph_end(users[i].graph, f->stream));
  }
  CHECK_OK(nvb_graph_share_workspace(users[0].graph, users[1].graph));
  for (int i = 0; i < 2; ++i) CHECK(pthread_create(&threads[i], NULL, launch_often, &users[i]) == 0);
  for (int i = 0; i < 2; ++i) pthread_join(threads[i], NULL);
  check_value(f, data, 2 * LAUNCHES);
  // One graph on two streams in turn.
  for (int i = 0; i < LAUNCHES; ++i) CHECK_OK(nvb_graph_launch(users[0].graph, users[i % 2].f.stream));
  for (int i = 0; i < 2; ++i) CHECK_OK(nvb_stream_synchronize(users[i].f.stream));
  check_value(f, data, 3 * LAUNCHES);
  for (int i = 0; i < 2; ++i) {
    CHECK_OK(nvb_graph_destroy(users[i].graph));
    CHECK_OK(nvb_stream_destroy(users[i].f.stream));
  }
  release(f, one);
  release(f, data);
}

// Memory that slept: the shared block is made ready again by whoever launches first.
static void test_sleep(fixture* f) {
  float* data = ones(f);
  nvb_graph *first = of_add(f, data), *second = of_add(f, data);
  CHECK_OK(nvb_graph_share_workspace(first, second));
  CHECK_OK(nvb_graph_launch(first, f->stream));
  CHECK_OK(nvb_graph_launch(second, f->stream));
  check_value(f, data, 4);
  CHECK_OK(nvb_memory_sleep(f->memory, 1, NULL));
  CHECK_FAILS(nvb_graph_launch(first, f->stream), NVB_ERROR_INVALID_ARGUMENT, "asleep");
  CHECK_OK(nvb_memory_wake(f->memory, NULL));
  CHECK_OK(nvb_graph_launch(second, f->stream));
  CHECK_OK(nvb_graph_launch(first, f->stream));
  check_value(f, data, 16);
  CHECK_OK(nvb_graph_destroy(first));
  CHECK_OK(nvb_graph_destroy(second));
  release(f, data);
}

static void test_refused(fixture* f) {
  nvb_graph *graph = NULL, *other = NULL;
  fixture stranger = open_fixture();
  CHECK_OK(nvb_graph_create(f->backend, &graph));
  CHECK_OK(nvb_graph_create(stranger.backend, &other));
  CHECK_FAILS(nvb_graph_share_workspace(graph, other), NVB_ERROR_INVALID_ARGUMENT, "another backend");
  CHECK_INVALID(nvb_graph_share_workspace(NULL, graph));
  CHECK_FAILS(nvb_graph_share_workspace(graph, foreign_handle()), NVB_ERROR_INVALID_ARGUMENT, "not a graph");
  // Empty graphs may share, whatever becomes of them.
  CHECK_OK(nvb_graph_share_workspace(graph, NULL));
  CHECK_OK(nvb_graph_destroy(other));
  CHECK_INVALID(nvb_graph_share_workspace(graph, other));
  CHECK_OK(nvb_graph_destroy(graph));
  close_fixture(&stranger);
}

// The backend may go before its graphs, and one graph after the other.
static void test_ends(void) {
  fixture f = open_fixture();
  float* data = ones(&f);
  nvb_graph *first = of_add(&f, data), *second = of_add(&f, data);
  CHECK_OK(nvb_graph_share_workspace(first, second));
  CHECK_OK(nvb_graph_launch(first, NULL));
  CHECK_OK(nvb_graph_launch(second, NULL));
  CHECK_OK(nvb_backend_synchronize(f.backend));
  release(&f, data);
  close_fixture(&f);
  CHECK_OK(nvb_graph_destroy(first));
  CHECK_OK(nvb_graph_destroy(second));
}

int main(void) {
  fixture f = open_fixture();
  test_sharing(&f);
  test_growth(&f);
  test_order(&f);
  test_sleep(&f);
  test_refused(&f);
  close_fixture(&f);
  test_ends();
  return test_result();
}
