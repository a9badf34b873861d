//! The bill of materials: CycloneDX 1.6, as JSON.

use serde_json::{Value, json};

use super::graph::{Graph, Package};

/// Returns the document. It has no serial number, because equal releases have equal bytes.
pub(super) fn write(graph: &Graph, timestamp: &str) -> String {
    let packages = &graph.packages;
    let root = &packages[graph.root];
    let mut main = component(root);
    main["type"] = json!("application");
    let others = packages.iter().filter(|package| *package != root);
    let components: Vec<Value> = others.map(component).collect();
    let dependencies: Vec<Value> = packages
        .iter()
        .map(|package| {
            let links: Vec<String> = package
                .links
                .iter()
                .map(|at| purl(&packages[*at]))
                .collect();
            json!({"ref": purl(package), "dependsOn": links})
        })
        .collect();
    let document = json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"timestamp": timestamp, "component": main},
        "components": components,
        "dependencies": dependencies,
    });
    format!("{document:#}\n")
}

fn component(package: &Package) -> Value {
    let mut component = json!({
        "type": "library",
        "bom-ref": purl(package),
        "name": package.name,
        "version": package.version,
        "purl": purl(package),
    });
    if let Some(licence) = &package.licence {
        // Old manifests separate licences by a slash, which is no SPDX expression.
        let expression = licence.replace('/', " OR ");
        component["licenses"] = json!([{"expression": expression}]);
    }
    if let Some(checksum) = &package.checksum {
        component["hashes"] = json!([{"alg": "SHA-256", "content": checksum}]);
    }
    component
}

fn purl(package: &Package) -> String {
    let version = package.version.replace('+', "%2B");
    format!("pkg:cargo/{}@{version}", package.name)
}
