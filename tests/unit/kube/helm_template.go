// Renders a chart's templates as `helm template` does, with what of Helm's functions they use beside sprig's:
// helm_template CHART NAMESPACE VALUES.json. For machines without Helm.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"gopkg.in/yaml.v3"
)

type files string

// Get gives what a file of the chart holds, or nothing.
func (chart files) Get(name string) string {
	text, _ := os.ReadFile(filepath.Join(string(chart), name))
	return string(text)
}

func toYaml(value any) string {
	text, err := yaml.Marshal(value)
	check(err)
	return strings.TrimSuffix(string(text), "\n")
}

func required(why string, value any) (any, error) {
	if value == nil || value == "" {
		return nil, errors.New(why)
	}
	return value, nil
}

// merged gives defaults with what is said instead of some; of mappings key by key.
func merged(defaults, said map[string]any) map[string]any {
	for name, value := range said {
		inner, both := value.(map[string]any)
		before, isMap := defaults[name].(map[string]any)
		if both && isMap {
			value = merged(before, inner)
		}
		defaults[name] = value
	}
	return defaults
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func main() {
	chart, namespace := os.Args[1], os.Args[2]
	text, err := os.ReadFile(filepath.Join(chart, "values.yaml"))
	check(err)
	var defaults, said map[string]any
	check(yaml.Unmarshal(text, &defaults))
	text, err = os.ReadFile(os.Args[3])
	check(err)
	check(json.Unmarshal(text, &said))
	all := template.New("chart").Option("missingkey=zero")
	functions := sprig.TxtFuncMap()
	functions["toYaml"], functions["required"] = toYaml, required
	functions["include"] = func(name string, data any) (string, error) {
		var out bytes.Buffer
		err := all.ExecuteTemplate(&out, name, data)
		return out.String(), err
	}
	all.Funcs(functions)
	paths, err := filepath.Glob(filepath.Join(chart, "templates", "*"))
	check(err)
	for _, path := range paths {
		text, err := os.ReadFile(path)
		check(err)
		_, err = all.New(filepath.Base(path)).Parse(string(text))
		check(err)
	}
	data := map[string]any{
		"Values":       merged(defaults, said),
		"Release":      map[string]any{"Name": "sftriage", "Namespace": namespace, "Service": "Helm"},
		"Chart":        map[string]any{"Name": "sftriage"},
		"Files":        files(chart),
		"Capabilities": map[string]any{"KubeVersion": map[string]any{"Version": "v1.31.0"}},
	}
	for _, path := range paths {
		if extension := filepath.Ext(path); extension == ".yaml" {
			fmt.Println("---")
			check(all.ExecuteTemplate(os.Stdout, filepath.Base(path), data))
		}
	}
}
