//! The devices of this machine, each with one backend that all tests share.

use crate::random::seed;
use nvbackend::backend::Backend;
use nvbackend::capi::backend::{nvb_backend, nvb_backend_create};
use nvbackend::capi::backend_options::nvb_backend_options;
use nvbackend::capi::status::NVB_OK;
use nvbackend::capi::structs::init;
use nvbackend::configuration::{Configuration, MemoryConfiguration};
use nvbackend::device::DeviceKind;
use nvbackend::hardware;
use std::ffi::CString;
use std::io::Write;
use std::sync::OnceLock;

pub struct Device {
    pub name: &'static str,
    pub backend: Backend,
    handle: OnceLock<BackendHandle>,
}

/// A backend of the C ABI, which lives as long as the tests.
struct BackendHandle(*const nvb_backend);

// SAFETY: calls that take a const backend may run at once from many threads.
unsafe impl Send for BackendHandle {}
// SAFETY: as above.
unsafe impl Sync for BackendHandle {}

impl Device {
    pub fn is_cpu(&self) -> bool {
        self.backend.device().kind == DeviceKind::Cpu
    }

    fn new(name: &'static str) -> Device {
        let pooling = std::env::var("NVB_TEST_POOLING").map_or(true, |value| value != "off");
        let memory = MemoryConfiguration { pooling, ..MemoryConfiguration::default() };
        let options = Configuration { device: name.to_string(), memory, ..Configuration::default() };
        let backend = Backend::new(options).unwrap_or_else(|error| panic!("device {name}: {error}"));
        Device { name, backend, handle: OnceLock::new() }
    }

    /// The same device for functions of the C ABI. Its memory is that of `backend` too.
    pub fn handle(&self) -> *const nvb_backend {
        let create = || {
            let name = CString::new(self.name).expect("a name without NUL");
            let mut options: nvb_backend_options = init();
            options.device = name.as_ptr();
            let mut backend = std::ptr::null_mut();
            // The first call of the C ABI sends panics to the library's log, and here they are to be seen.
            let hook = std::panic::take_hook();
            // SAFETY: a struct with its size set, and a place for the handle.
            let status = unsafe { nvb_backend_create(&options, &mut backend) };
            std::panic::set_hook(hook);
            assert_eq!(status, NVB_OK, "device {}", self.name);
            BackendHandle(backend)
        };
        self.handle.get_or_init(create).0
    }
}

/// The CPU, and the first GPU if there is one; NVB_TEST_DEVICE ("cpu" or "cuda:0") names one of them. With
/// NVB_TEST_POOLING=off every block is an allocation of the driver's, whose ends compute-sanitizer watches.
pub fn devices() -> &'static [Device] {
    static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();
    DEVICES.get_or_init(|| {
        crate::level::force();
        // The test harness swallows what the print macros write; this line must be seen.
        let say = |text: String| writeln!(std::io::stderr(), "conformance: {text}").expect("stderr is open");
        say(format!("NVB_TEST_SEED={} repeats this run's data", seed()));
        let wanted = std::env::var("NVB_TEST_DEVICE").ok().filter(|name| !name.is_empty());
        let mut devices = Vec::new();
        match wanted.as_deref() {
            Some("cpu") => devices.push(Device::new("cpu")),
            Some("cuda" | "cuda:0") => devices.push(Device::new("cuda:0")),
            Some(other) => panic!("NVB_TEST_DEVICE is {other:?}; \"cpu\" or \"cuda:0\" is needed"),
            None => {
                devices.push(Device::new("cpu"));
                match hardware::gpus() {
                    Ok(found) if !found.is_empty() => devices.push(Device::new("cuda:0")),
                    Ok(_) => say("cuda is skipped: the driver lists no device".into()),
                    Err(error) => say(format!("cuda is skipped: {error}")),
                }
            }
        }
        for Device { name, backend, .. } in &devices {
            let info = backend.device();
            say(format!("runs on {name}: {}, compute capability {}", info.name, info.compute_capability));
        }
        devices
    })
}
