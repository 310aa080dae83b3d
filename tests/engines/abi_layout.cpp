// The plug-in's declarations of ggml's structs lie in memory as those of a source package's headers do: compiled with
// the package's folders ggml/include and ggml/src in the path, for the tables that belong to its version.
//
//   -DNVB_TABLES=Tables_0_10    the tables that the package's version has
#include <cstddef>
#include <cstdint>
#include <cstdio>

#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "ggml.h"

#include "../../engines/ggml/tables.hpp"
#include "../../engines/ggml/tables_0_10.hpp"
#include "../../engines/ggml/tables_0_9.hpp"

namespace ours = nvb_ggml;
using Layout = ours::Interface<ours::NVB_TABLES>;
using BufferTable = ours::NVB_TABLES::BufferTable;
using StreamTable = ours::NVB_TABLES::StreamTable;

#define SAME_PLACE(our_struct, our_field, struct_, field)                                                   \
  static_assert(offsetof(our_struct, our_field) == offsetof(struct_, field), #struct_ "." #field " moved"); \
  static_assert(sizeof(our_struct::our_field) == sizeof(struct_::field), #struct_ "." #field " has another size")
#define SAME_SIZE(our_struct, struct_) \
  static_assert(sizeof(our_struct) == sizeof(struct_), #struct_ " has another size")

// Tensors are read up to their name.
SAME_PLACE(ours::Tensor, type, ggml_tensor, type);
SAME_PLACE(ours::Tensor, buffer, ggml_tensor, buffer);
SAME_PLACE(ours::Tensor, ne, ggml_tensor, ne);
SAME_PLACE(ours::Tensor, nb, ggml_tensor, nb);
SAME_PLACE(ours::Tensor, op, ggml_tensor, op);
SAME_PLACE(ours::Tensor, parameters, ggml_tensor, op_params);
SAME_PLACE(ours::Tensor, flags, ggml_tensor, flags);
SAME_PLACE(ours::Tensor, source, ggml_tensor, src);
SAME_PLACE(ours::Tensor, view_source, ggml_tensor, view_src);
SAME_PLACE(ours::Tensor, view_offset, ggml_tensor, view_offs);
SAME_PLACE(ours::Tensor, data, ggml_tensor, data);
SAME_PLACE(ours::Tensor, name, ggml_tensor, name);

// Graphs are read up to `uid`, with which the struct ends where it has it.
SAME_PLACE(ours::Graph, node_count, ggml_cgraph, n_nodes);
SAME_PLACE(ours::Graph, nodes, ggml_cgraph, nodes);
SAME_PLACE(ours::Graph, use_counts, ggml_cgraph, use_counts);
SAME_PLACE(ours::Graph, visited_size, ggml_cgraph, visited_hash_set.size);
SAME_PLACE(ours::Graph, visited_used, ggml_cgraph, visited_hash_set.used);
SAME_PLACE(ours::Graph, visited, ggml_cgraph, visited_hash_set.keys);
SAME_PLACE(ours::Graph, order, ggml_cgraph, order);
static_assert(sizeof(ggml_cgraph) == sizeof(ours::Graph) || sizeof(ggml_cgraph) == offsetof(ours::Graph, uid));

SAME_SIZE(ours::BufferTypeTable, ggml_backend_buffer_type_i);
SAME_PLACE(ours::BufferTypeTable, get_name, ggml_backend_buffer_type_i, get_name);
SAME_PLACE(ours::BufferTypeTable, allocate, ggml_backend_buffer_type_i, alloc_buffer);
SAME_PLACE(ours::BufferTypeTable, get_alignment, ggml_backend_buffer_type_i, get_alignment);
SAME_PLACE(ours::BufferTypeTable, get_max_size, ggml_backend_buffer_type_i, get_max_size);
SAME_PLACE(ours::BufferTypeTable, get_alloc_size, ggml_backend_buffer_type_i, get_alloc_size);
SAME_PLACE(ours::BufferTypeTable, is_host, ggml_backend_buffer_type_i, is_host);
SAME_SIZE(ours::BufferType, ggml_backend_buffer_type);
SAME_PLACE(ours::BufferType, device, ggml_backend_buffer_type, device);
SAME_PLACE(ours::BufferType, context, ggml_backend_buffer_type, context);

SAME_SIZE(BufferTable, ggml_backend_buffer_i);
SAME_PLACE(BufferTable, free, ggml_backend_buffer_i, free_buffer);
SAME_PLACE(BufferTable, get_base, ggml_backend_buffer_i, get_base);
SAME_PLACE(BufferTable, init_tensor, ggml_backend_buffer_i, init_tensor);
SAME_PLACE(BufferTable, memset_tensor, ggml_backend_buffer_i, memset_tensor);
SAME_PLACE(BufferTable, set_tensor, ggml_backend_buffer_i, set_tensor);
SAME_PLACE(BufferTable, get_tensor, ggml_backend_buffer_i, get_tensor);
SAME_PLACE(BufferTable, copy_tensor, ggml_backend_buffer_i, cpy_tensor);
SAME_PLACE(BufferTable, clear, ggml_backend_buffer_i, clear);
SAME_PLACE(BufferTable, reset, ggml_backend_buffer_i, reset);
SAME_SIZE(Layout::HostBuffer, ggml_backend_buffer);
SAME_PLACE(Layout::HostBuffer, type, ggml_backend_buffer, buft);
SAME_PLACE(Layout::HostBuffer, context, ggml_backend_buffer, context);
SAME_PLACE(Layout::HostBuffer, size, ggml_backend_buffer, size);
SAME_PLACE(Layout::HostBuffer, usage, ggml_backend_buffer, usage);

SAME_SIZE(StreamTable, ggml_backend_i);
SAME_PLACE(StreamTable, get_name, ggml_backend_i, get_name);
SAME_PLACE(StreamTable, free, ggml_backend_i, free);
SAME_PLACE(StreamTable, set_tensor_async, ggml_backend_i, set_tensor_async);
SAME_PLACE(StreamTable, get_tensor_async, ggml_backend_i, get_tensor_async);
SAME_PLACE(StreamTable, copy_tensor_async, ggml_backend_i, cpy_tensor_async);
SAME_PLACE(StreamTable, synchronize, ggml_backend_i, synchronize);
SAME_PLACE(StreamTable, plan_create, ggml_backend_i, graph_plan_create);
SAME_PLACE(StreamTable, plan_compute, ggml_backend_i, graph_plan_compute);
SAME_PLACE(StreamTable, compute, ggml_backend_i, graph_compute);
SAME_PLACE(StreamTable, record_event, ggml_backend_i, event_record);
SAME_PLACE(StreamTable, wait_event, ggml_backend_i, event_wait);
SAME_PLACE(StreamTable, optimize, ggml_backend_i, graph_optimize);
SAME_SIZE(Layout::HostStream, ggml_backend);
SAME_PLACE(Layout::HostStream, guid, ggml_backend, guid);
SAME_PLACE(Layout::HostStream, table, ggml_backend, iface);
SAME_PLACE(Layout::HostStream, device, ggml_backend, device);
SAME_PLACE(Layout::HostStream, context, ggml_backend, context);
SAME_SIZE(ours::Event, ggml_backend_event);
SAME_PLACE(ours::Event, context, ggml_backend_event, context);

SAME_SIZE(ours::DeviceTable, ggml_backend_device_i);
SAME_PLACE(ours::DeviceTable, get_name, ggml_backend_device_i, get_name);
SAME_PLACE(ours::DeviceTable, get_description, ggml_backend_device_i, get_description);
SAME_PLACE(ours::DeviceTable, get_memory, ggml_backend_device_i, get_memory);
SAME_PLACE(ours::DeviceTable, get_type, ggml_backend_device_i, get_type);
SAME_PLACE(ours::DeviceTable, get_properties, ggml_backend_device_i, get_props);
SAME_PLACE(ours::DeviceTable, create_stream, ggml_backend_device_i, init_backend);
SAME_PLACE(ours::DeviceTable, get_buffer_type, ggml_backend_device_i, get_buffer_type);
SAME_PLACE(ours::DeviceTable, get_host_buffer_type, ggml_backend_device_i, get_host_buffer_type);
SAME_PLACE(ours::DeviceTable, buffer_from_host_pointer, ggml_backend_device_i, buffer_from_host_ptr);
SAME_PLACE(ours::DeviceTable, supports_operation, ggml_backend_device_i, supports_op);
SAME_PLACE(ours::DeviceTable, supports_buffer_type, ggml_backend_device_i, supports_buft);
SAME_PLACE(ours::DeviceTable, offload_operation, ggml_backend_device_i, offload_op);
SAME_PLACE(ours::DeviceTable, create_event, ggml_backend_device_i, event_new);
SAME_PLACE(ours::DeviceTable, destroy_event, ggml_backend_device_i, event_free);
SAME_PLACE(ours::DeviceTable, synchronize_event, ggml_backend_device_i, event_synchronize);
SAME_SIZE(ours::Device, ggml_backend_device);
SAME_PLACE(ours::Device, registration, ggml_backend_device, reg);
SAME_PLACE(ours::Device, context, ggml_backend_device, context);
// `mmap_support` fills padding where a version has no such member, so the size is the same.
SAME_SIZE(ours::DeviceProperties, ggml_backend_dev_props);
SAME_PLACE(ours::DeviceProperties, name, ggml_backend_dev_props, name);
SAME_PLACE(ours::DeviceProperties, memory_total, ggml_backend_dev_props, memory_total);
SAME_PLACE(ours::DeviceProperties, type, ggml_backend_dev_props, type);
SAME_PLACE(ours::DeviceProperties, id, ggml_backend_dev_props, device_id);
static_assert(offsetof(ours::DeviceProperties, capabilities) == offsetof(ggml_backend_dev_props, caps));
SAME_PLACE(ours::DeviceCapabilities, async, ggml_backend_dev_caps, async);
SAME_PLACE(ours::DeviceCapabilities, host_buffer, ggml_backend_dev_caps, host_buffer);
SAME_PLACE(ours::DeviceCapabilities, buffer_from_host_pointer, ggml_backend_dev_caps, buffer_from_host_ptr);
SAME_PLACE(ours::DeviceCapabilities, events, ggml_backend_dev_caps, events);

SAME_SIZE(ours::RegistrationTable, ggml_backend_reg_i);
SAME_PLACE(ours::RegistrationTable, get_device_count, ggml_backend_reg_i, get_device_count);
SAME_PLACE(ours::RegistrationTable, get_device, ggml_backend_reg_i, get_device);
SAME_PLACE(ours::RegistrationTable, get_function, ggml_backend_reg_i, get_proc_address);
SAME_SIZE(ours::Registration, ggml_backend_reg);
SAME_PLACE(ours::Registration, api_version, ggml_backend_reg, api_version);
SAME_PLACE(ours::Registration, table, ggml_backend_reg, iface);
SAME_PLACE(ours::Registration, context, ggml_backend_reg, context);
SAME_SIZE(ours::Feature, ggml_backend_feature);

static_assert(int{ours::TENSOR_FLAG_OUTPUT} == GGML_TENSOR_FLAG_OUTPUT);
static_assert(ours::API_VERSION == GGML_BACKEND_API_VERSION);
static_assert(int{ours::TYPE_F32} == GGML_TYPE_F32 && int{ours::TYPE_F16} == GGML_TYPE_F16);
static_assert(int{ours::TYPE_BF16} == GGML_TYPE_BF16 && int{ours::TYPE_I32} == GGML_TYPE_I32);
static_assert(int{ours::TYPE_I64} == GGML_TYPE_I64 && int{ours::TYPE_Q4_0} == GGML_TYPE_Q4_0);
static_assert(int{ours::TYPE_Q8_0} == GGML_TYPE_Q8_0 && int{ours::TYPE_Q4_K} == GGML_TYPE_Q4_K);
static_assert(int{ours::TYPE_Q6_K} == GGML_TYPE_Q6_K);
static_assert(int{ours::STATUS_ALLOC_FAILED} == GGML_STATUS_ALLOC_FAILED);
static_assert(int{ours::STATUS_FAILED} == GGML_STATUS_FAILED && int{ours::STATUS_SUCCESS} == GGML_STATUS_SUCCESS);
static_assert(int{ours::LOG_INFO} == GGML_LOG_LEVEL_INFO && int{ours::LOG_WARN} == GGML_LOG_LEVEL_WARN);
static_assert(int{ours::LOG_ERROR} == GGML_LOG_LEVEL_ERROR);
static_assert(int{ours::DEVICE_TYPE_GPU} == GGML_BACKEND_DEVICE_TYPE_GPU);
static_assert(ours::MAX_SOURCES == GGML_MAX_SRC && ours::MAX_PARAMETERS * sizeof(int32_t) == GGML_MAX_OP_PARAMS);

int main() {
  std::puts("the layout is the package's");
  return 0;
}
