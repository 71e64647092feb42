// What PyTorch asks of a kind of device: which one is current, its streams and events. Here there is nothing to wait
// for, as every operation runs on the CPU; an event keeps the time.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <cstdlib>

namespace {

thread_local c10::DeviceIndex current = 0;

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct FakeGpus final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType kind = c10::DeviceType::PrivateUse1;

  c10::DeviceType type() const override { return kind; }
  c10::DeviceIndex deviceCount() const noexcept override {
    const char* count = std::getenv("FAKE_GPUS");
    return count ? static_cast<c10::DeviceIndex>(std::atoi(count)) : 4;
  }
  c10::Device getDevice() const override { return {kind, current}; }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before{kind, current};
    current = device.index();
    return before;
  }

  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}

  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new double;
    *static_cast<double*>(*event) = now_ms();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return *static_cast<double*>(second) - *static_cast<double*>(first);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<double*>(event); }
};

}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, FakeGpus)
