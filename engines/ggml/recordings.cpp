#include "recordings.hpp"

namespace nvb_ggml {
namespace {

// Decodes of several numbers of sequences, drafts of another model and the passes of a prompt take turns: 4,096 tokens,
// 512 a pass, are eight graphs and some short ones. A recording keeps some megabytes on a GPU.
constexpr size_t kMostRecordings = 16;
// A launch costs a GPU's host about what so many calls do.
constexpr int kLeastWork = 4;

}  // namespace

Recordings::~Recordings() {
  for (Recording& recording : recordings_) drop(recording);
}

void Recordings::drop(Recording& recording) {
  nvb_graph_destroy(recording.graph);
  recording.graph = nullptr;
}

// The recording of this graph, which has none yet if it came for the first time. One that came by its number is not
// read.
Recordings::Recording& Recordings::find(Graph* graph) {
  const uint64_t uid = device_.host().uid(graph);
  for (Recording& recording : recordings_) {
    if (uid != 0 && recording.uid == uid) return recording;
  }
  key_.read(device_.host(), graph);
  for (Recording& recording : recordings_) {
    if (!(recording.key == key_)) continue;
    recording.uid = uid;
    return recording;
  }
  if (recordings_.size() < kMostRecordings) {
    recordings_.emplace_back();
  } else {
    // The one that did not come for longest.
    size_t oldest = 0;
    for (size_t i = 1; i < recordings_.size(); ++i) {
      if (recordings_[i].last < recordings_[oldest].last) oldest = i;
    }
    drop(recordings_[oldest]);
    GraphKey key;
    key.swap(recordings_[oldest].key);
    recordings_[oldest] = Recording();
    recordings_[oldest].key.swap(key);
    std::swap(recordings_[oldest], recordings_.back());
  }
  Recording& made = recordings_.back();
  made.key.swap(key_);
  made.uid = uid;
  return made;
}

// Leaves no graph if something of it cannot be recorded, and tries again after twice as many steps.
void Recordings::record(Recording& recording, const std::function<nvb_status()>& queue,
                        const std::function<Memory()>& memory) {
  recording.next_try = 2 * recording.count;
  const Memory before = memory();
  recording.weights = device_.weights_version();
  if (nvb_graph_create(device_.backend(), &recording.graph) != NVB_OK) return;
  nvb_status status = nvb_graph_begin(recording.graph, stream_);
  if (status == NVB_OK) {
    status = queue();
    const nvb_status end = nvb_graph_end(recording.graph, stream_);
    if (status == NVB_OK) status = end;
  }
  recording.memory = memory();
  // Earlier calls of the list would name memory that has gone.
  if (status != NVB_OK || recording.memory != before) drop(recording);
}

nvb_status Recordings::compute(Graph* graph, const std::function<nvb_status()>& prepare,
                               const std::function<nvb_status()>& queue, const std::function<Memory()>& memory) {
  Recording& recording = find(graph);
  recording.last = ++clock_;
  ++recording.count;
  if (recording.graph != nullptr && (recording.memory != memory() || recording.weights != device_.weights_version())) {
    drop(recording);
    recording.next_try = recording.count + 1;
  }
  if (recording.graph == nullptr) {
    const nvb_status status = prepare();
    if (status != NVB_OK) return status;
  }
  if (recording.graph == nullptr && recording.count >= recording.next_try && recording.key.work() >= kLeastWork) {
    record(recording, queue, memory);
  }
  if (recording.graph == nullptr) return queue();
  const nvb_status status = nvb_graph_launch(recording.graph, stream_);
  device_.succeeded(status, "launching a graph");
  return status;
}

}  // namespace nvb_ggml
