//! The function graph tracer of Linux: duration of each call of kernel functions, in the ring
//! buffers of tracefs. Kernels without the function profiler, such as Debian's, have this tracer.
//! `kernel/trace/trace_functions_graph.c`: `print_graph_entry_leaf` and `print_graph_return` print
//! the lines.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read as _};
use std::path::Path;
use std::sync::Arc;

use crate::function_profiler::{
    Calls, Filter, MAX_CPUS, MAX_FILE, ProfilerError, change, idle, io_error, microseconds, open,
    read, source_name,
};
use crate::profiler_switch::ProfilerSwitch;
use crate::tracefs::Tracefs;

const TRACER: &str = "function_graph";
/// Directory of the CPUs' buffers.
const CPUS: &str = "per_cpu";
/// Maximum number of bytes that are read from the buffers of all CPUs; a buffer of the default size
/// prints 1.4 MB. Later calls do not count.
const MAX_TEXT: u64 = 1 << 30;
/// Maximum length of a line in bytes.
const MAX_LINE: u64 = 4096;

type IsIdle = fn(&str) -> bool;

/// Files that show another trace, or a setting that excludes calls.
const IDLE: [(&str, IsIdle); 10] = [
    ("current_tracer", |line| line == "nop"),
    ("set_ftrace_filter", is_comment),
    ("set_ftrace_notrace", is_comment),
    ("set_ftrace_pid", |line| line == "no pid"),
    ("set_graph_function", is_comment),
    ("set_graph_notrace", is_comment),
    ("max_graph_depth", |line| line == "0"),
    ("tracing_thresh", |line| line == "0"),
    ("set_event", |_| false),
    ("trace", is_comment),
];

fn is_comment(line: &str) -> bool {
    line.starts_with('#')
}

/// A running tracer. Dropping it stops it and restores the settings.
#[derive(Debug)]
pub(crate) struct GraphTracer {
    tracefs: Arc<Tracefs>,
    /// The functions that it times.
    found: Vec<String>,
    switch: ProfilerSwitch,
}

impl GraphTracer {
    /// Starts to trace those of `functions` that the kernel has. `switch` stops it at any time.
    ///
    /// # Errors
    /// The directory is not tracefs, the kernel has no such tracer or none of `required`, or
    /// somebody else traces.
    pub(crate) fn start(
        tracefs: &Path,
        functions: &[&str],
        required: &[&str],
        switch: &ProfilerSwitch,
    ) -> Result<Self, ProfilerError> {
        let dir = open(tracefs)?;
        let tracers = dir.read("available_tracers", MAX_FILE).unwrap_or_default();
        if !tracers.split_whitespace().any(|name| name == TRACER) {
            return Err(ProfilerError::NoProfiler(tracefs.to_owned()));
        }
        for (name, is_idle) in IDLE {
            idle(&dir, name, is_idle)?;
        }
        let Filter { text, found } = Filter::new(&dir, functions, required)?;
        let tracer = Self {
            tracefs: Arc::clone(&dir),
            found,
            switch: switch.clone(),
        };
        tracer.set("tracing_on", "0")?;
        change(switch, &dir, "set_ftrace_filter", &text, "")?;
        // The change back also clears the buffers.
        change(switch, &dir, "current_tracer", TRACER, "nop")?;
        tracer.set("options/funcgraph-duration", "1")?;
        // Prints the function after its closing brace.
        tracer.set("options/funcgraph-tail", "1")?;
        change(switch, &dir, "tracing_on", "1", "0")?;
        Ok(tracer)
    }

    /// Stops the tracer and returns the calls of each function that are in the buffers: those of
    /// the last moments, if the buffers were too small.
    ///
    /// # Errors
    /// A file cannot be read, or has another form than the kernel prints.
    pub(crate) fn finish(self) -> Result<BTreeMap<String, Calls>, ProfilerError> {
        // Nothing may change after a signal, which has restored this setting.
        change(&self.switch, &self.tracefs, "tracing_on", "0", "0")?;
        let list_error = |source| io_error(&self.tracefs, CPUS, source);
        let mut cpus = Vec::new();
        for name in self.tracefs.list(CPUS).map_err(list_error)? {
            if cpus.len() == MAX_CPUS {
                return Err(ProfilerError::TooManyCpus(self.tracefs.path(CPUS)));
            }
            cpus.push(format!("{CPUS}/{}/trace", name.map_err(list_error)?));
        }
        let mut calls = BTreeMap::new();
        let mut left = MAX_TEXT;
        for name in cpus {
            let file = self.tracefs.reader(&name);
            let file = file.map_err(|source| io_error(&self.tracefs, &name, source))?;
            let mut buffer = BufReader::new(file.take(left));
            let path = self.tracefs.path(&name);
            add(&mut buffer, &self.found, &path, &mut calls)?;
            left = buffer.into_inner().limit();
        }
        Ok(calls)
    }

    /// Changes a setting until the end.
    fn set(&self, name: &'static str, value: &str) -> Result<(), ProfilerError> {
        let before = read(&self.tracefs, name, MAX_FILE)?;
        change(&self.switch, &self.tracefs, name, value, before.trim())
    }
}

impl Drop for GraphTracer {
    fn drop(&mut self) {
        self.switch.end();
    }
}

/// Adds the calls in the buffer of one CPU to `calls`.
fn add(
    buffer: &mut impl BufRead,
    wanted: &[String],
    path: &Path,
    calls: &mut BTreeMap<String, Calls>,
) -> Result<(), ProfilerError> {
    let mut bytes = Vec::new();
    let mut number = 0;
    loop {
        bytes.clear();
        let mut line = buffer.take(MAX_LINE);
        let length = line
            .read_until(b'\n', &mut bytes)
            .map_err(|source| ProfilerError::Io {
                path: path.to_owned(),
                source,
            })?;
        number += 1;
        let malformed = |reason| ProfilerError::Malformed {
            path: path.to_owned(),
            line: number,
            reason,
        };
        if bytes.pop() != Some(b'\n') {
            // The end of the buffer, or of the bytes that are read from it.
            return match length as u64 == MAX_LINE {
                true => Err(malformed("longer than 4096 bytes")),
                false => Ok(()),
            };
        }
        // The names of processes may be any bytes.
        let text = String::from_utf8_lossy(&bytes);
        let Some((name, time)) = call(&text) else {
            continue;
        };
        if !wanted.iter().any(|wanted| wanted == name) {
            continue;
        }
        let time = microseconds(time).map_err(malformed)?;
        let sum = calls.entry(name.to_owned()).or_default();
        // A buffer has fewer lines than the counter has values.
        sum.hits = sum.hits.saturating_add(1);
        sum.microseconds += time;
    }
}

/// Returns the function and the time of a line that ends a call. These are a leaf,
/// ` 0)   1.752 us    |  name();`, and a closing brace, ` 0) + 64.305 us   |  } /* name */`.
fn call(line: &str) -> Option<(&str, &str)> {
    let (before, after) = line.split_once(" us ")?;
    let time = before.rsplit(' ').next()?;
    let text = after.trim_start().strip_prefix('|')?.trim_start();
    let symbol = match text.strip_prefix('}') {
        Some(tail) => tail.trim_start().strip_prefix("/*")?.trim_start(),
        None => text,
    };
    // A module's name, arguments or a result may follow.
    let symbol = symbol.split([' ', '(', ';']).next()?;
    Some((source_name(symbol), time))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FUNCTIONS: [&str; 3] = ["qi_submit_sync", "iommu_dma_unmap_page", "viommu_sync_req"];

    fn of(text: &[u8]) -> Result<Vec<(String, u64, f64)>, ProfilerError> {
        let mut calls = BTreeMap::new();
        add(
            &mut &text[..],
            &FUNCTIONS.map(str::to_owned),
            Path::new("trace"),
            &mut calls,
        )?;
        let list = calls.into_iter();
        Ok(list
            .map(|(name, one)| (name, one.hits, one.microseconds))
            .collect())
    }

    #[test]
    fn lines_of_the_kernel_are_read() {
        // Linux 6.12.117, with a process whose name is no text.
        let text =
            b"# tracer: function_graph\n#\n# CPU  DURATION                  FUNCTION CALLS\n\
            # |     |   |                     |   |   |   |\n \
            0) + 64.305 us   |    } /* qi_submit_sync */\n \
            0) + 78.426 us   |  } /* iommu_dma_unmap_page */\n \
            ------------------------------------------\n \
            0)    <idle>-0    =>     d\xff-182    \n \
            ------------------------------------------\n\n \
            0)               |  iommu_dma_unmap_page() {\n \
            0) * 33660.25 us |    qi_submit_sync();\n \
            0) $ 1234567 us  |  } /* iommu_dma_unmap_page ret=0x0 */\n \
            0)   1.752 us    |  iommu_dma_map_page();\n \
            1)   2.500 us    |  viommu_sync_req [virtio_iommu]();\n";
        assert_eq!(
            of(text).unwrap(),
            [
                ("iommu_dma_unmap_page".to_owned(), 2, 1_234_645.426),
                ("qi_submit_sync".to_owned(), 2, 33_724.555),
                ("viommu_sync_req".to_owned(), 1, 2.5),
            ]
        );
    }

    #[test]
    fn parts_of_functions_count_as_the_function() {
        let line = " 0)   1.5 us    |  } /* iommu_completion_wait.isra.0 */";
        assert_eq!(call(line), Some(("iommu_completion_wait", "1.5")));
    }

    #[test]
    fn other_lines_do_not_count_or_are_refused() {
        for text in [
            "",
            "no end of line 0)   1.0 us    |  qi_submit_sync();",
            " 0)   1.0 us    |  }\n",
            " 0)   1.0 us    qi_submit_sync();\n",
            " 0)   1.0 us    |  schedule();\n",
            " us \n us | \n us |} /*\n",
        ] {
            assert_eq!(of(text.as_bytes()).unwrap(), [], "{text}");
        }
        for (time, reason) in [
            ("two", "not a time"),
            ("", "not a time"),
            ("-1.0", "not a plausible time"),
            ("nan", "not a plausible time"),
            ("1e300", "not a plausible time"),
        ] {
            let text = format!("\n 0) {time} us    |  qi_submit_sync();\n");
            let error = of(text.as_bytes()).unwrap_err().to_string();
            assert_eq!(error, format!("trace: line 2: {reason}"));
        }
        let error = of(&[b'x'; 5000]).unwrap_err().to_string();
        assert_eq!(error, "trace: line 1: longer than 4096 bytes");
    }
}
