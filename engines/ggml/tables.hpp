// The functions that a host calls, for one layout of the tables of buffers and streams. Each unwraps what the plug-in's
// classes need and calls them; what happens stands in those classes.
#pragma once

#include <cstring>
#include <new>

#include "operations.hpp"
#include "registration.hpp"
#include "stream.hpp"

namespace nvb_ggml {

template <class Tables>
struct Interface {
  // Both as the host allocates or reads them.
  struct HostBuffer {
    typename Tables::BufferTable table;
    BufferType* type;
    void* context;
    size_t size;
    int32_t usage;
  };
  struct HostStream {
    const uint8_t (*guid)[16];
    typename Tables::StreamTable table;
    Device* device;
    void* context;
  };
  using BufferInit = Buffer* (*)(BufferType*, typename Tables::BufferTable, void* context, size_t size);

  static BufferState& state(Buffer* buffer) {
    return *static_cast<BufferState*>(reinterpret_cast<HostBuffer*>(buffer)->context);
  }
  static StreamState& state(Stream* stream) {
    return *static_cast<StreamState*>(reinterpret_cast<HostStream*>(stream)->context);
  }
  static DeviceState& state(Device* device) { return *static_cast<DeviceState*>(device->context); }
  static DeviceState& state(BufferType* type) { return *static_cast<DeviceState*>(type->device->context); }

  static char* at(const Tensor* tensor, size_t offset) { return static_cast<char*>(tensor->data) + offset; }

  // The buffer of this plug-in's device memory that holds a tensor, a view's too; NULL for any other.
  static BufferState* buffer_of(const Tensor* tensor) {
    Buffer* buffer = tensor->view_source != nullptr ? tensor->view_source->buffer : tensor->buffer;
    if (buffer == nullptr || reinterpret_cast<HostBuffer*>(buffer)->table.get_base != &get_base) return nullptr;
    return &state(buffer);
  }

  // Buffers of device memory.

  static void free_buffer(Buffer* buffer) { delete &state(buffer); }
  static void* get_base(Buffer* buffer) { return state(buffer).base(); }
  static void memset_tensor(Buffer* buffer, Tensor* tensor, uint8_t value, size_t offset, size_t size) {
    state(buffer).device().fill(at(tensor, offset), value, size);
  }
  static void set_tensor(Buffer* buffer, Tensor* tensor, const void* data, size_t offset, size_t size) {
    state(buffer).device().copy(at(tensor, offset), data, size, NVB_COPY_HOST_TO_DEVICE);
  }
  static void get_tensor(Buffer* buffer, const Tensor* tensor, void* data, size_t offset, size_t size) {
    state(buffer).device().copy(data, at(tensor, offset), size, NVB_COPY_DEVICE_TO_HOST);
  }
  static void set_tensor_2d(Buffer* buffer, Tensor* tensor, const void* data, size_t offset, size_t size, size_t count,
                            size_t tensor_stride, size_t data_stride) {
    for (size_t i = 0; i < count; ++i) {
      set_tensor(buffer, tensor, static_cast<const char*>(data) + i * data_stride, offset + i * tensor_stride, size);
    }
  }
  static void get_tensor_2d(Buffer* buffer, const Tensor* tensor, void* data, size_t offset, size_t size, size_t count,
                            size_t tensor_stride, size_t data_stride) {
    for (size_t i = 0; i < count; ++i) {
      get_tensor(buffer, tensor, static_cast<char*>(data) + i * data_stride, offset + i * tensor_stride, size);
    }
  }
  // false: the host copies by way of its own memory.
  static bool copy_tensor(Buffer* buffer, const Tensor* source, Tensor* destination) {
    BufferState* from = buffer_of(source);
    DeviceState& device = state(buffer).device();
    if (from == nullptr || &from->device() != &device) return false;
    device.copy(destination->data, source->data, device.host().bytes(*source), NVB_COPY_DEVICE_TO_DEVICE);
    return true;
  }
  static void clear(Buffer* buffer, uint8_t value) {
    BufferState& all = state(buffer);
    all.device().fill(all.base(), value, all.bytes());
  }

  static typename Tables::BufferTable device_table() {
    typename Tables::BufferTable table = {};
    table.free = free_buffer;
    table.get_base = get_base;
    table.memset_tensor = memset_tensor;
    table.set_tensor = set_tensor;
    table.get_tensor = get_tensor;
    if constexpr (Tables::has_2d_copies) {
      table.set_tensor_2d = set_tensor_2d;
      table.get_tensor_2d = get_tensor_2d;
    }
    table.copy_tensor = copy_tensor;
    table.clear = clear;
    return table;
  }

  // Buffers of page-locked host memory, which the host reads and writes itself.

  struct Pinned {
    DeviceState* device;
    void* base;
    size_t bytes;
  };
  static Pinned& pinned(Buffer* buffer) {
    return *static_cast<Pinned*>(reinterpret_cast<HostBuffer*>(buffer)->context);
  }
  static void free_pinned(Buffer* buffer) {
    pinned(buffer).device->free_host(pinned(buffer).base, pinned(buffer).bytes);
    delete &pinned(buffer);
  }
  static void* get_pinned_base(Buffer* buffer) { return pinned(buffer).base; }
  static void memset_pinned(Buffer*, Tensor* tensor, uint8_t value, size_t offset, size_t size) {
    std::memset(at(tensor, offset), value, size);
  }
  static void set_pinned(Buffer*, Tensor* tensor, const void* data, size_t offset, size_t size) {
    std::memcpy(at(tensor, offset), data, size);
  }
  static void get_pinned(Buffer*, const Tensor* tensor, void* data, size_t offset, size_t size) {
    std::memcpy(data, at(tensor, offset), size);
  }
  static void clear_pinned(Buffer* buffer, uint8_t value) {
    std::memset(pinned(buffer).base, value, pinned(buffer).bytes);
  }

  // Types of buffers.

  static Buffer* init(DeviceState& device, BufferType* type, const typename Tables::BufferTable& table, void* context,
                      size_t size) {
    return reinterpret_cast<BufferInit>(device.host().buffer_init())(type, table, context, size);
  }
  static const char* type_name(BufferType* type) { return state(type).name(); }
  static Buffer* allocate(BufferType* type, size_t size) {
    DeviceState& device = state(type);
    void* base = device.allocate(size);
    if (base == nullptr) return nullptr;
    auto* buffer = new (std::nothrow) BufferState(device, base, size, true);
    if (buffer != nullptr) return init(device, type, device_table(), buffer, size);
    device.free(base);
    return nullptr;
  }
  // Rows that begin at multiples of 16 bytes run fastest; 128 is what the memory system moves at once.
  static size_t alignment(BufferType*) { return 128; }
  static bool is_host(BufferType*) { return true; }
  static const char* pinned_type_name(BufferType*) { return "NVB_Host"; }
  static Buffer* allocate_pinned(BufferType* type, size_t size) {
    DeviceState& device = state(type);
    void* base = device.allocate_host(size);
    if (base == nullptr) return nullptr;
    auto* buffer = new (std::nothrow) Pinned{&device, base, size};
    if (buffer == nullptr) {
      device.free_host(base, size);
      return nullptr;
    }
    typename Tables::BufferTable table = {};
    table.free = free_pinned;
    table.get_base = get_pinned_base;
    table.memset_tensor = memset_pinned;
    table.set_tensor = set_pinned;
    table.get_tensor = get_pinned;
    table.clear = clear_pinned;
    return init(device, type, table, buffer, size);
  }

  // Streams.

  static const char* stream_name(Stream* stream) { return state(stream).device().name(); }
  static void free_stream(Stream* stream) {
    delete &state(stream);
    delete reinterpret_cast<HostStream*>(stream);
  }
  static void synchronize(Stream* stream) { state(stream).synchronize(); }
  static void set_async(Stream* stream, Tensor* tensor, const void* data, size_t offset, size_t size) {
    StreamState& to = state(stream);
    to.device().copy_async(at(tensor, offset), data, size, NVB_COPY_HOST_TO_DEVICE, to.stream());
  }
  static void get_async(Stream* stream, const Tensor* tensor, void* data, size_t offset, size_t size) {
    StreamState& from = state(stream);
    from.device().copy_async(data, at(tensor, offset), size, NVB_COPY_DEVICE_TO_HOST, from.stream());
  }
  static void set_2d_async(Stream* stream, Tensor* tensor, const void* data, size_t offset, size_t size, size_t count,
                           size_t tensor_stride, size_t data_stride) {
    for (size_t i = 0; i < count; ++i) {
      set_async(stream, tensor, static_cast<const char*>(data) + i * data_stride, offset + i * tensor_stride, size);
    }
  }
  static void get_2d_async(Stream* stream, const Tensor* tensor, void* data, size_t offset, size_t size, size_t count,
                           size_t tensor_stride, size_t data_stride) {
    for (size_t i = 0; i < count; ++i) {
      get_async(stream, tensor, static_cast<char*>(data) + i * data_stride, offset + i * tensor_stride, size);
    }
  }
  // Between two streams of one device; others go by way of the host.
  static bool copy_async(Stream* from, Stream* to, const Tensor* source, Tensor* destination) {
    if (reinterpret_cast<HostStream*>(from)->table.compute != &compute) return false;
    BufferState *read = buffer_of(source), *written = buffer_of(destination);
    DeviceState& device = state(to).device();
    if (read == nullptr || written == nullptr || &read->device() != &device || &written->device() != &device) {
      return false;
    }
    if (from != to) {
      nvb_event* event = nullptr;
      nvb_status status = nvb_event_create(device.backend(), &event);
      if (status == NVB_OK) status = nvb_event_record(event, state(from).stream());
      if (status == NVB_OK) status = nvb_stream_wait_event(state(to).stream(), event);
      nvb_event_destroy(event);
      if (!device.succeeded(status, "ordering two streams")) return false;
    }
    const size_t bytes = device.host().bytes(*source);
    device.copy_async(destination->data, source->data, bytes, NVB_COPY_DEVICE_TO_DEVICE, state(to).stream());
    return true;
  }
  static int32_t compute(Stream* stream, Graph* graph) { return state(stream).compute(graph); }
  static void record_event(Stream* stream, Event* event) {
    StreamState& from = state(stream);
    from.device().succeeded(nvb_event_record(static_cast<nvb_event*>(event->context), from.stream()),
                            "recording an event");
  }
  static void wait_event(Stream* stream, Event* event) {
    StreamState& to = state(stream);
    to.device().succeeded(nvb_stream_wait_event(to.stream(), static_cast<nvb_event*>(event->context)),
                          "waiting for an event");
  }

  static Stream* create_stream(Device* device, const char*) {
    static const uint8_t guid[16] = {0x6e, 0x76, 0x62, 0x61, 0x63, 0x6b, 0x65, 0x6e,
                                     0x64, 0x2e, 0x67, 0x67, 0x6d, 0x6c, 0x00, 0x01};
    std::unique_ptr<StreamState> made = StreamState::create(state(device));
    auto* stream = new (std::nothrow) HostStream();
    if (made == nullptr || stream == nullptr) {
      delete stream;
      return nullptr;
    }
    stream->guid = &guid;
    stream->device = device;
    stream->context = made.release();
    typename Tables::StreamTable& table = stream->table;
    table.get_name = stream_name;
    table.free = free_stream;
    table.set_tensor_async = set_async;
    table.get_tensor_async = get_async;
    if constexpr (Tables::has_2d_copies) {
      table.set_tensor_2d_async = set_2d_async;
      table.get_tensor_2d_async = get_2d_async;
    }
    table.copy_tensor_async = copy_async;
    table.synchronize = synchronize;
    table.compute = compute;
    table.record_event = record_event;
    table.wait_event = wait_event;
    return reinterpret_cast<Stream*>(stream);
  }

  // Devices.

  static const char* device_name(Device* device) { return state(device).name(); }
  static const char* device_description(Device* device) { return state(device).description(); }
  static void device_memory(Device* device, size_t* free, size_t* total) { state(device).get_memory(free, total); }
  static int32_t device_type(Device*) { return DEVICE_TYPE_GPU; }
  static void device_properties(Device* device, DeviceProperties* properties) {
    DeviceState& of = state(device);
    properties->name = of.name();
    properties->description = of.description();
    of.get_memory(&properties->memory_free, &properties->memory_total);
    properties->type = DEVICE_TYPE_GPU;
    properties->id = of.pci_id();
    // A GPU reads no mapped file, and hosts copy from one to the device's memory.
    properties->capabilities = {true, true, of.is_cpu(), true, of.is_cpu()};
  }
  static BufferType* buffer_type(Device* device) { return &Plugin::of(device).buffer_type; }
  static BufferType* host_buffer_type(Device* device) { return &Plugin::of(device).host_buffer_type; }
  static Buffer* from_host_pointer(Device* device, void* pointer, size_t size, size_t) {
    DeviceState& of = state(device);
    if (!of.is_cpu()) return nullptr;
    auto* buffer = new (std::nothrow) BufferState(of, pointer, size, false);
    return buffer == nullptr ? nullptr : init(of, buffer_type(device), device_table(), buffer, size);
  }
  static bool supports_operation(Device* device, const Tensor* node) {
    return nvb_ggml::supports_operation(state(device), *node);
  }
  static bool supports_buffer_type(Device* device, BufferType* type) { return type == buffer_type(device); }
  static bool offload_operation(Device* device, const Tensor* node) {
    return is_worth_offloading(state(device), *node);
  }
  static Event* create_event(Device* device) {
    nvb_event* event = nullptr;
    if (!state(device).succeeded(nvb_event_create(state(device).backend(), &event), "creating an event"))
      return nullptr;
    auto* made = new (std::nothrow) Event{device, event};
    if (made == nullptr) nvb_event_destroy(event);
    return made;
  }
  static void destroy_event(Device*, Event* event) {
    nvb_event_destroy(static_cast<nvb_event*>(event->context));
    delete event;
  }
  static void synchronize_event(Device* device, Event* event) {
    state(device).succeeded(nvb_event_synchronize(static_cast<nvb_event*>(event->context)), "waiting for an event");
  }

  static DeviceTable device_functions() {
    DeviceTable table = {};
    table.get_name = device_name;
    table.get_description = device_description;
    table.get_memory = device_memory;
    table.get_type = device_type;
    table.get_properties = device_properties;
    table.create_stream = create_stream;
    table.get_buffer_type = buffer_type;
    table.get_host_buffer_type = host_buffer_type;
    table.buffer_from_host_pointer = from_host_pointer;
    table.supports_operation = supports_operation;
    table.supports_buffer_type = supports_buffer_type;
    table.offload_operation = offload_operation;
    table.create_event = create_event;
    table.destroy_event = destroy_event;
    table.synchronize_event = synchronize_event;
    return table;
  }
  static BufferTypeTable buffer_type_functions() {
    BufferTypeTable table = {};
    table.get_name = type_name;
    table.allocate = allocate;
    table.get_alignment = alignment;
    return table;
  }
  static BufferTypeTable host_buffer_type_functions() {
    BufferTypeTable table = {};
    table.get_name = pinned_type_name;
    table.allocate = allocate_pinned;
    table.get_alignment = alignment;
    table.is_host = is_host;
    return table;
  }
};

}  // namespace nvb_ggml
