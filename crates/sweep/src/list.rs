//! Lists of tasks: one JSON object a line, as `ringfence sweep --list` prints them.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use crate::error::{PlanError, Problem};
use crate::plan::{MAX_TASKS, check_ranges};
use crate::task::{OUTPUT, Task};

/// Maximum number of bytes of a line. A task has about 650 and its path.
const MAX_LINE: u64 = 64 << 10;

/// Parses one line of a list.
///
/// # Errors
/// The line is not a task of this version, its name is not that of its content, or a number is
/// outside its range in a plan.
pub fn task_of_line(line: &str) -> Result<Task, Problem> {
    let task: Task =
        serde_json::from_str(line).map_err(|error| Problem::NotATask(error.to_string()))?;
    let content = &task.content;
    if content.output != OUTPUT || content.engine != env!("CARGO_PKG_VERSION") {
        return Err(Problem::OtherVersion {
            engine: content.engine.clone(),
            output: content.output,
        });
    }
    let name = content.name();
    if task.name != name {
        return Err(Problem::OtherName {
            name: task.name,
            content: name,
        });
    }
    check_ranges(content)?;
    Ok(task)
}

/// Reads a list of tasks.
///
/// # Errors
/// The file cannot be read, has more than [`MAX_TASKS`] tasks, or a line is not a task.
pub fn read_list(path: &Path) -> Result<Vec<Task>, PlanError> {
    let mut file = BufReader::new(File::open(path).map_err(PlanError::io(path))?);
    let mut tasks = Vec::new();
    let mut line = Vec::new();
    loop {
        let number = tasks.len() + 1;
        let wrong = |problem| PlanError::at(path, number, problem);
        line.clear();
        let read = (&mut file).take(MAX_LINE).read_until(b'\n', &mut line);
        if read.map_err(PlanError::io(path))? == 0 {
            return Ok(tasks);
        }
        if number > MAX_TASKS {
            return Err(wrong(Problem::TooManyTasks { limit: MAX_TASKS }));
        }
        let text = String::from_utf8_lossy(&line);
        tasks.push(task_of_line(text.trim_end()).map_err(wrong)?);
    }
}
