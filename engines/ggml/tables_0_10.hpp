// The tables of buffers and streams from ggml 0.10 on, with copies of several ranges at equal distances. `optimize` got
// its last argument by 0.25; an earlier host leaves it undefined, and the plug-in does not read it.
#pragma once

#include "ggml_abi.hpp"

namespace nvb_ggml {

struct Tables_0_10 {
  struct BufferTable {
    void (*free)(Buffer*);
    void* (*get_base)(Buffer*);
    int32_t (*init_tensor)(Buffer*, Tensor*);
    void (*memset_tensor)(Buffer*, Tensor*, uint8_t value, size_t offset, size_t size);
    void (*set_tensor)(Buffer*, Tensor*, const void* data, size_t offset, size_t size);
    void (*get_tensor)(Buffer*, const Tensor*, void* data, size_t offset, size_t size);
    void (*set_tensor_2d)(Buffer*, Tensor*, const void* data, size_t offset, size_t size, size_t count,
                          size_t tensor_stride, size_t data_stride);
    void (*get_tensor_2d)(Buffer*, const Tensor*, void* data, size_t offset, size_t size, size_t count,
                          size_t tensor_stride, size_t data_stride);
    bool (*copy_tensor)(Buffer*, const Tensor* source, Tensor* destination);
    void (*clear)(Buffer*, uint8_t value);
    void (*reset)(Buffer*);
  };

  struct StreamTable {
    const char* (*get_name)(Stream*);
    void (*free)(Stream*);
    void (*set_tensor_async)(Stream*, Tensor*, const void* data, size_t offset, size_t size);
    void (*get_tensor_async)(Stream*, const Tensor*, void* data, size_t offset, size_t size);
    void (*set_tensor_2d_async)(Stream*, Tensor*, const void* data, size_t offset, size_t size, size_t count,
                                size_t tensor_stride, size_t data_stride);
    void (*get_tensor_2d_async)(Stream*, const Tensor*, void* data, size_t offset, size_t size, size_t count,
                                size_t tensor_stride, size_t data_stride);
    bool (*copy_tensor_async)(Stream* from, Stream* to, const Tensor* source, Tensor* destination);
    void (*synchronize)(Stream*);
    void* (*plan_create)(Stream*, const Graph*);
    void (*plan_free)(Stream*, void* plan);
    void (*plan_update)(Stream*, void* plan, const Graph*);
    int32_t (*plan_compute)(Stream*, void* plan);
    int32_t (*compute)(Stream*, Graph*);
    void (*record_event)(Stream*, Event*);
    void (*wait_event)(Stream*, Event*);
    void (*optimize)(Stream*, Graph*, void* parameters);
  };

  static constexpr bool has_2d_copies = true;
};

}  // namespace nvb_ggml
