// What ggml's back-end interface lays down in memory, in this project's words: the structs and numbers that are the
// same in every version that the plug-in knows. No header of ggml is included; tests/engines/abi_layout.cpp compares
// sizes and offsets with the headers of ggml's source packages, and Host::probe compares a tensor of the running
// host's.
//
// Structs end here where the plug-in stops reading: what a host lays behind those members may change.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nvb_ggml {

// Opaque: the plug-in holds its address and hands it to functions of the host.
struct Context;

// Numbers of types are never reused (ggml.h adds new ones at the end), other than those of operations.
enum Type : int32_t {
  TYPE_F32 = 0,
  TYPE_F16 = 1,
  TYPE_Q4_0 = 2,
  TYPE_Q4_1 = 3,
  TYPE_Q5_0 = 6,
  TYPE_Q5_1 = 7,
  TYPE_Q8_0 = 8,
  TYPE_Q2_K = 10,
  TYPE_Q3_K = 11,
  TYPE_Q4_K = 12,
  TYPE_Q5_K = 13,
  TYPE_Q6_K = 14,
  TYPE_IQ4_NL = 20,
  TYPE_IQ4_XS = 23,
  TYPE_I32 = 26,
  TYPE_I64 = 27,
  TYPE_BF16 = 30,
  TYPE_MXFP4 = 39,
};

enum Status : int32_t {
  STATUS_ALLOC_FAILED = -2,
  STATUS_FAILED = -1,
  STATUS_SUCCESS = 0,
};

enum LogLevel : int32_t { LOG_INFO = 2, LOG_WARN = 3, LOG_ERROR = 4 };

enum DeviceType : int32_t { DEVICE_TYPE_GPU = 1 };

// The caller reads the tensor after the graph.
constexpr int32_t TENSOR_FLAG_OUTPUT = 2;
// The host must compute the node. Versions that know no such flag leave it 0.
constexpr int32_t TENSOR_FLAG_COMPUTE = 16;

constexpr int MAX_SOURCES = 10;
// `parameters[0]` of a product that shall not be rounded.
constexpr int32_t PRECISION_F32 = 10;
constexpr int MAX_PARAMETERS = 16;

// Opaque here: its members before the shared ones differ, see the tables' headers.
struct Buffer;

// Extents and strides are innermost first. A stride is in bytes, that of axis 0 the size of an element or a block.
struct Tensor {
  int32_t type;
  Buffer* buffer;
  int64_t ne[4];
  size_t nb[4];
  int32_t op;
  int32_t parameters[MAX_PARAMETERS];
  int32_t flags;
  Tensor* source[MAX_SOURCES];
  Tensor* view_source;
  size_t view_offset;
  void* data;
  char name[64];
};

// Nodes come from functions of the host. The members behind them are read where `Host::probe` has seen that they are
// there: versions before them have a shorter struct.
struct Graph {
  int32_t size, node_count, leaf_count;
  Tensor** nodes;
  Tensor** gradients;
  Tensor** gradient_sums;
  Tensor** leafs;
  // How often each tensor is a source in the whole graph of which this one may be a part, by its place in `visited`.
  int32_t* use_counts;
  // A hash table with open addressing, a bit in `visited_used` for each place that is taken.
  size_t visited_size;
  uint32_t* visited_used;
  Tensor** visited;
  int32_t order;
  // Another number for each graph that the host's scheduler makes; 0 for those that are made otherwise.
  uint64_t uid;
};

struct Device;
struct BufferType;
struct Registration;

struct BufferTypeTable {
  const char* (*get_name)(BufferType*);
  Buffer* (*allocate)(BufferType*, size_t size);
  size_t (*get_alignment)(BufferType*);
  size_t (*get_max_size)(BufferType*);
  size_t (*get_alloc_size)(BufferType*, const Tensor*);
  bool (*is_host)(BufferType*);
};

struct BufferType {
  BufferTypeTable table;
  Device* device;
  void* context;
};

// `mmap_support` lies where versions without it have padding.
struct DeviceCapabilities {
  bool async;
  bool host_buffer;
  bool buffer_from_host_pointer;
  bool events;
  bool mmap_support;
};

struct DeviceProperties {
  const char* name;
  const char* description;
  size_t memory_free;
  size_t memory_total;
  int32_t type;
  const char* id;
  DeviceCapabilities capabilities;
};

struct Event {
  Device* device;
  void* context;
};

// A `Stream` is what ggml calls a backend; its layout is the tables'.
struct Stream;

struct DeviceTable {
  const char* (*get_name)(Device*);
  const char* (*get_description)(Device*);
  void (*get_memory)(Device*, size_t* free, size_t* total);
  int32_t (*get_type)(Device*);
  void (*get_properties)(Device*, DeviceProperties*);
  Stream* (*create_stream)(Device*, const char* parameters);
  BufferType* (*get_buffer_type)(Device*);
  BufferType* (*get_host_buffer_type)(Device*);
  Buffer* (*buffer_from_host_pointer)(Device*, void* pointer, size_t size, size_t max_tensor_size);
  bool (*supports_operation)(Device*, const Tensor*);
  bool (*supports_buffer_type)(Device*, BufferType*);
  bool (*offload_operation)(Device*, const Tensor*);
  Event* (*create_event)(Device*);
  void (*destroy_event)(Device*, Event*);
  void (*synchronize_event)(Device*, Event*);
};

struct Device {
  DeviceTable table;
  Registration* registration;
  void* context;
};

struct RegistrationTable {
  const char* (*get_name)(Registration*);
  size_t (*get_device_count)(Registration*);
  Device* (*get_device)(Registration*, size_t index);
  void* (*get_function)(Registration*, const char* name);
};

struct Registration {
  int32_t api_version;
  RegistrationTable table;
  void* context;
};

// An entry of the list that the function "ggml_backend_get_features" returns, which a NULL name ends.
struct Feature {
  const char* name;
  const char* value;
};

constexpr int32_t API_VERSION = 2;
// Of ggml_backend_buffer_usage.
constexpr int32_t BUFFER_USAGE_WEIGHTS = 1;

}  // namespace nvb_ggml
